"""Traces: what the readers make of good and bad files, base histories, and replay.

Outside values are those published beside the public sets (rows, users, shares, Zipf exponents).
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hlem_env.errors import ArgumentError, TraceFormatError
from hlem_env.workload.requests import Catalogue, Requests
from hlem_env.workload.trace_readers import (
    FORMATS,
    guess_format,
    read_hourly,
    read_trace,
    read_user_counts,
)
from hlem_env.workload.traces import Trace, TraceWorkload, with_base_histories, zipf_exponent

MOVIES = "7::0011::8::1100\n9::0012::7::1000\n7::0013::10::1100\n7::0011::0::1050\n"
TAOBAO = (
    "5,1,10,pv,1511658000\n6,2,10,buy,1511658000\n5,1,10,cart,1511658000\n5,3,11,fav,1511658009\n"
)
GAMES = "1 40\n1 41\n1 42\n2 40\n"
BOOKS = "0 10 11 12\n1 10\n2 \n"
PROMPTS = [(0, 1300, [0, 1, 2]), (0, 700, [0, 9]), (3000, 2000, [0, 1, 2, 3]), (3000, 500, [0])]
MOONCAKE = "".join(
    json.dumps({"timestamp": t, "input_length": n, "output_length": 3, "hash_ids": ids}) + "\n"
    for t, n, ids in PROMPTS
)
TABLE = "arrival_s,user_id,history_length,new_items\n3.5,8,101,1\n1.0,8,100,100\n2.25,4,7,7\n"
SAMPLES = {
    "movietweetings": MOVIES,
    "taobao-userbehavior": TAOBAO,
    "video-games": GAMES,
    "books-sets": BOOKS,
    "mooncake": MOONCAKE,
    "csv": TABLE,
}


def write(folder: Path, text: str | bytes, name: str = "trace.txt") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def rows(requests: Trace | Requests) -> list[tuple[float, int, int, int]]:
    return list(
        zip(
            requests.arrival_s.tolist(),
            requests.user.tolist(),
            requests.history_length.tolist(),
            requests.new_items.tolist(),
            strict=True,
        )
    )


def by_user(requests: Requests) -> dict[int, list[tuple[int, int]]]:
    histories: dict[int, list[tuple[int, int]]] = {}
    for _, user, length, added in rows(requests):
        histories.setdefault(user, []).append((length, added))
    return histories


# Formats


def test_movietweetings(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, MOVIES))
    assert rows(trace) == [(0, 0, 1, 1), (50, 1, 1, 1), (100, 1, 2, 1), (100, 1, 3, 1)]
    assert trace.metadata["format"] == "movietweetings"
    assert trace.metadata["items"] == 3
    assert "sorted" in trace.metadata["notes"][0]


def test_taobao_keeps_every_event_of_a_second(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, TAOBAO))
    assert rows(trace) == [(0, 0, 1, 1), (0, 1, 1, 1), (0, 0, 2, 1), (9, 0, 3, 1)]
    assert trace.metadata["notes"] == []


def test_video_games_histories_are_prefixes_at_drawn_times(tmp_path: Path) -> None:
    path = write(tmp_path, GAMES)
    trace = read_trace(path, duration_s=1000, seed=3)
    assert trace.arrival_s[-1] < 1000
    assert sorted(len(history) for history in by_user(trace).values()) == [1, 3]  # type: ignore[arg-type]
    for history in by_user(trace).values():  # type: ignore[arg-type]
        assert history == [(n + 1, 1) for n in range(len(history))]
    assert read_trace(path, duration_s=1000, seed=3).digest() == trace.digest()
    assert read_trace(path, duration_s=1000, seed=4).digest() != trace.digest()
    assert "drawn" in trace.metadata["notes"][0]


def test_books_histories_are_static(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, BOOKS))
    assert sorted(by_user(trace).values()) == [[(1, 1)], [(3, 3), (3, 0), (3, 0)]]  # type: ignore[arg-type]
    assert any("an empty list, who make no request: 1" in note for note in trace.metadata["notes"])


def test_mooncake_reuses_the_prefix_of_the_users_last_prompt(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, MOONCAKE))
    assert trace.user.tolist() == [0, 1, 0, 2]
    assert trace.history_length.tolist() == [1300, 700, 2000, 500]
    # Three shared blocks of 512 tokens hold 1,536 tokens, more than the first prompt filled.
    assert trace.new_items.tolist() == [1300, 700, 2000 - 3 * 512, 500]
    assert not trace.histories_grow or trace.new_items[2] == 700


def test_csv_in_any_order_of_lines_and_columns(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, TABLE))
    assert rows(trace) == [(0, 0, 100, 100), (1.25, 1, 7, 7), (2.5, 0, 101, 1)]
    assert any("sorted" in note for note in trace.metadata["notes"])
    other = (
        "x,new_items,arrival_s,history_length,user_id\n,100,1,100,8\na,7,2.25,7,4\n,1,3.5,101,8\n"
    )
    again = read_trace(write(tmp_path, other, "other.csv"))
    assert again.digest() == trace.digest()


def test_parquet_gives_what_csv_gives(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "arrival_s": [3.5, 1.0, 2.25],
        "user_id": [8, 8, 4],
        "history_length": [101, 100, 7],
        "new_items": [1, 100, 7],
    }
    path = tmp_path / "trace.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    csv = read_trace(write(tmp_path, TABLE))
    assert read_trace(path).digest() == csv.digest()
    columns["history_length"][1] = 99  # below its new items
    columns["user_id"][2] = None  # type: ignore[call-overload]
    parquet.write_table(pyarrow.table(columns), path)
    with pytest.raises(TraceFormatError, match=r"parquet:2: .*history_length=99, new_items=100"):
        read_trace(path)
    trace = read_trace(path, on_bad_line="skip")
    assert (len(trace), trace.skipped) == (1, 2)
    columns["user_id"] = ["a", "b", "c"]  # type: ignore[list-item]
    parquet.write_table(pyarrow.table(columns), path)
    with pytest.raises(TraceFormatError, match="user_id is of type string"):
        read_trace(path, on_bad_line="skip")
    parquet.write_table(pyarrow.table({"arrival_s": [1.0]}), path)
    with pytest.raises(TraceFormatError, match="no column user_id, history_length, new_items"):
        read_trace(path)
    write(tmp_path, "PAR1 is not enough", "trace.parquet")
    with pytest.raises(TraceFormatError, match="cannot be read as Parquet"):
        read_trace(path)


def test_parquet_without_pyarrow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"hlem\[parquet\]"):
        read_trace(write(tmp_path, "PAR1", "trace.parquet"))


@pytest.mark.parametrize("format", SAMPLES)
@pytest.mark.parametrize("block_bytes", [1, 7, 64])
def test_reading_in_small_blocks_changes_nothing(
    tmp_path: Path, format: str, block_bytes: int
) -> None:
    path = write(tmp_path, SAMPLES[format])
    whole = read_trace(path, format)
    parts = read_trace(path, format, block_bytes=block_bytes)
    assert parts.digest() == whole.digest()
    assert parts.metadata == whole.metadata


@pytest.mark.parametrize("format", SAMPLES)
def test_format_is_recognised_and_line_ends_do_not_matter(tmp_path: Path, format: str) -> None:
    path = write(tmp_path, SAMPLES[format])
    assert guess_format(path) == format
    other = b"\xef\xbb\xbf" + SAMPLES[format].replace("\n", "\r\n").rstrip("\r\n").encode()
    windows = write(tmp_path, other, "windows.txt")
    assert guess_format(windows) == format
    assert read_trace(windows).digest() == read_trace(path).digest()


def test_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    path = write(tmp_path, "what is this\n")
    with pytest.raises(ArgumentError) as caught:
        read_trace(path)
    assert all(name in str(caught.value) for name in FORMATS)
    with pytest.raises(ArgumentError, match="movietweetings"):
        read_trace(path, "movielens")
    with pytest.raises(ArgumentError, match="on_bad_line"):
        read_trace(path, "csv", "ignore")


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.csv", tmp_path):
        with pytest.raises(ArgumentError, match=path.name):
            read_trace(path)
    for text in (b"", b"\xef\xbb\xbf"):
        for name in FORMATS:
            with pytest.raises(TraceFormatError, match=r"empty|no line|Parquet"):
                read_trace(write(tmp_path, text), name)
    with pytest.raises(TraceFormatError, match="empty"):
        read_trace(write(tmp_path, ""))
    with pytest.raises(TraceFormatError, match="no line"):
        read_trace(write(tmp_path, "x\ny\n"), "video-games", "skip")


# Bad lines

BAD_LINES = [
    ("movietweetings", "7::11::8\n", "3 fields"),
    ("movietweetings", "7:11:8:9\n", "1 field in"),
    ("movietweetings", "7::11::8::12.5\n", "unix_s='12.5' is not an integer"),
    ("movietweetings", "7::11::8::-5\n", "unix_s='-5' is out of range; .* 0 to 4294967295"),
    ("movietweetings", "7::11::11::5\n", "rating='11' .* 0 to 10"),
    ("movietweetings", "7::11::8::1365029107000\n", "unix_s='1365029107000'"),
    ("movietweetings", "7::" + "1" * 60 + "::8::5\n", r"item='1{29}\.\.\.1+' is out of range"),
    ("movietweetings", "\n", "empty"),
    ("taobao-userbehavior", "5,1,10,look,1511658000\n", "behaviour='look'; allowed: pv, cart"),
    ("taobao-userbehavior", "5,1,10,,1511658000\n", "behaviour=''"),
    ("taobao-userbehavior", "5,1,10,pv,nan\n", "unix_s='nan'"),
    ("taobao-userbehavior", "5,1,10,pv,1511658000,\n", "6 fields"),
    ("taobao-userbehavior", "5, 1,10,pv,1511658000\n", "item=' 1' is not an integer"),
    ("video-games", "1 x\n", "item='x'"),
    ("video-games", "1 2 3\n", "3 fields"),
    ("books-sets", "7 1 x\n", "item='x' is not an integer"),
    ("books-sets", "7  1\n", "item=''"),
    ("books-sets", "0 1\n", "user=0 has a line already"),
    ("mooncake", "{\n", "not JSON"),
    ("mooncake", "[" * 100_000 + "\n", "not JSON"),
    ("mooncake", "[1]\n", "allowed: an object"),
    ("mooncake", '{"timestamp": NaN, "input_length": 5, "hash_ids": [1]}\n', "timestamp=nan"),
    ("mooncake", '{"timestamp": 9000, "input_length": 0, "hash_ids": [1]}\n', "input_length=0"),
    ("mooncake", '{"timestamp": 9000, "input_length": true, "hash_ids": [1]}\n', "length=True"),
    ("mooncake", '{"timestamp": 9000, "input_length": 5, "hash_ids": []}\n', r"hash_ids=\[\]"),
    ("mooncake", '{"timestamp": 9000, "input_length": 5, "hash_ids": [-1]}\n', r"hash_ids=\[-1\]"),
    ("mooncake", '{"timestamp": 9000, "input_length": 5}\n', "hash_ids=None"),
    ("mooncake", '{"timestamp": 10, "input_length": 5, "hash_ids": [1]}\n', "10 goes backwards"),
    ("csv", "-1,8,100,1\n", "arrival_s='-1'"),
    ("csv", "nan,8,100,1\n", "arrival_s='nan'"),
    ("csv", "inf,8,100,1\n", "arrival_s='inf'"),
    ("csv", "1,8.5,100,1\n", "user_id='8.5'"),
    ("csv", "1,8,0,0\n", "history_length='0' .* 1 to 2147483647"),
    ("csv", "1,8,2147483648,1\n", "history_length='2147483648'"),
    ("csv", "1,8,100,101\n", "new_items='101' .* 0 to 100"),
    ("csv", "1,8,100\n", "3 fields"),
    *(
        (name, line, reason)
        for name in SAMPLES
        for line, reason in (
            (b"1 \0\n", "NUL byte at column 3"),
            (b"1,\xff\n", "byte 0xff at column 3 is not UTF-8"),
            (b"1" * (2**20 + 1) + b"\n", "longer than the 1 MiB"),
            (b" " * (3 * 2**20) + b"\n", "longer than the 1 MiB"),
        )
    ),
]


@pytest.mark.parametrize(("format", "line", "reason"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_named_or_skipped(
    tmp_path: Path, format: str, line: str | bytes, reason: str
) -> None:
    good = SAMPLES[format].encode()
    bad = line.encode() if isinstance(line, str) else line
    expected = read_trace(write(tmp_path, good), format)
    path = write(tmp_path, good + bad + bad, "bad.txt")
    number = good.count(b"\n") + 1
    for block_bytes in (100_000, 2**22):
        with pytest.raises(TraceFormatError, match=reason) as caught:
            read_trace(path, format, block_bytes=block_bytes)
        assert (caught.value.line, caught.value.path) == (number, str(path))
        assert len(str(caught.value)) < 500 + len(str(path))
        trace = read_trace(path, format, "skip", block_bytes=block_bytes)
        assert trace.skipped == 2
        assert trace.skipped_reasons[1].startswith(f"line {number + 1}: ")
        assert trace.digest() == expected.digest()


def test_only_the_first_reasons_are_kept(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, GAMES + "x\n" * 50), on_bad_line="skip")
    assert trace.skipped == 50
    assert [reason.split(":")[0] for reason in trace.skipped_reasons] == [
        f"line {n}" for n in range(5, 10)
    ]


def test_a_line_of_exactly_the_limit_is_read(tmp_path: Path) -> None:
    start, item = b"5", b" 1"
    line = start + item * ((2**20 - 1) // 2)
    line += b" " * (2**20 - len(line))
    assert len(read_trace(write(tmp_path, line), "books-sets", block_bytes=5000)) == 2**19 - 1
    with pytest.raises(TraceFormatError, match="longer"):
        read_trace(write(tmp_path, line + b"1"), "books-sets", block_bytes=5000)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.sampled_from(["movietweetings", "taobao-userbehavior", "video-games"]),
    st.lists(st.text(st.sampled_from("0123456789 :,-pvbuy\r\0é"), max_size=40), max_size=5),
)
def test_every_refused_line_has_a_reason(tmp_path: Path, format: str, lines: list[str]) -> None:
    """The fast parser refuses exactly the lines in which the slow one finds a fault."""
    path = write(tmp_path, SAMPLES[format] + "\n".join(lines))
    trace = read_trace(path, format, on_bad_line="skip")
    assert not any("does not fit" in reason for reason in trace.skipped_reasons)


def test_csv_header_is_checked(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match=":1: no column user_id, history_length, new_items"):
        read_trace(write(tmp_path, "arrival_s,user\n1,2\n"), "csv")
    counts = write(tmp_path, "user_id,total_interaction_count\n1,5\n2,x\n")
    with pytest.raises(TraceFormatError, match="3: total_interaction_count='x'"):
        read_user_counts(counts)


def test_hourly_curve_shapes_the_arrivals(tmp_path: Path) -> None:
    hourly = write(
        tmp_path, "date,hour,time_total_interaction_count\na,0,0\na,1,3\na,2,0\na,3,1\n", "hourly"
    )
    assert read_hourly(hourly).tolist() == [0, 3, 0, 1]
    games = write(tmp_path, "".join(f"{user} 1\n" for user in range(40_000)), "games")
    trace = read_trace(games, hourly=hourly, duration_s=4 * 3600)
    # The first arrival, from which the trace counts, is drawn right at the start of hour 1.
    hours = np.bincount(((trace.arrival_s + 3600) // 3600).astype(int), minlength=4)
    assert hours / 40_000 == pytest.approx([0, 0.75, 0, 0.25], abs=0.01)


# Trace


def test_from_arrays_renumbers_sorts_and_shifts() -> None:
    trace = Trace.from_arrays([9.0, 5.0, 7.0, 5.0], [30, 10, 20, 30], [4, 2, 3, 1], [1, 2, 3, 1])
    assert rows(trace) == [(0, 0, 2, 2), (0, 1, 1, 1), (2, 2, 3, 3), (4, 1, 4, 1)]
    assert trace.users == 3
    assert trace.is_first.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    "arrays",
    [
        ([], [], [], []),
        ([0.0], [1, 2], [1], [1]),
        ([0.0, 1.0], [1, 2], [1], [1]),
        ([np.nan], [1], [1], [1]),
        ([0.0], [1], [0], [0]),
        ([0.0], [1], [2], [3]),
        ([0.0], [1], [2**31], [1]),
        ([0.0], [1], [1.5], [1]),
    ],
)
def test_from_arrays_refuses(arrays: tuple[list[float], ...]) -> None:
    with pytest.raises(ArgumentError):
        Trace.from_arrays(*arrays)  # type: ignore[arg-type]


@given(st.floats(0.2, 1.5))
@settings(max_examples=20, deadline=None)
def test_zipf_exponent_is_found_again(exponent: float) -> None:
    assert zipf_exponent(1e6 * np.arange(1, 2001.0) ** -exponent) == pytest.approx(
        exponent, abs=1e-3
    )


# Base histories


def growing_trace(users: list[int], seconds: float = 100.0) -> Trace:
    """Users in this order, evenly spaced, one new item each."""
    seen: dict[int, int] = {}
    lengths = []
    for user in users:
        seen[user] = seen.get(user, 0) + 1
        lengths.append(seen[user])
    times = np.linspace(0, seconds, len(users))
    return Trace.from_arrays(times, users, lengths, np.ones(len(users)))


many_users = st.lists(st.integers(0, 8), min_size=1, max_size=80)


@given(many_users, st.integers(0, 5), st.integers(4, 40))
@settings(deadline=None)
def test_base_histories_grow_and_lose_their_oldest_quarter(
    users: list[int], seed: int, longest: int
) -> None:
    trace = with_base_histories(growing_trace(users), [10, 20, 30], seed, 1.0, longest)
    last: dict[int, int] = {}
    for _, user, length, added in rows(trace):
        if user not in last:
            assert added == length <= longest
        elif last[user] < longest:
            assert (length, added) == (last[user] + 1, 1)
        else:
            assert (length, added) == (longest + 1 - (longest + 1) // 4, 1)
        last[user] = length
    assert trace.histories_grow
    again = with_base_histories(growing_trace(users), [10, 20, 30], seed, 1.0, longest)
    assert again.digest() == trace.digest()


def test_base_histories_are_declared_synthetic() -> None:
    native = growing_trace([0, 1, 0, 0])
    trace = with_base_histories(native, None, np.random.default_rng(1))
    about = trace.metadata["synthetic_histories"]
    assert about["native_mean_tokens"] == 1.75
    assert about["counts"] == "lognormal"
    assert "synthetic" in trace.metadata["notes"][0]
    assert "synthetic_histories" not in native.metadata
    json.dumps(trace.metadata)
    with pytest.raises(ArgumentError, match="counts"):
        with_base_histories(native, [], 0)
    with pytest.raises(ArgumentError, match="scale"):
        with_base_histories(native, None, 0, scale=0)


def test_lognormal_has_the_published_mean_and_median() -> None:
    trace = growing_trace(list(range(200_000)))
    counts = with_base_histories(trace, None, 0, scale=1.0, max_tokens=10**9).history_length
    assert counts.mean() == pytest.approx(1226, rel=0.02)
    assert np.median(counts) == pytest.approx(747, rel=0.02)


# Replay


def played(workload: TraceWorkload, until_s: float, step_s: float) -> Requests:
    """What `take` gives up to `until_s` in steps."""
    taken, now_s = Requests.empty(), -1000.0
    while now_s < until_s:
        now_s = min(now_s + step_s, until_s)
        part = workload.take(now_s)
        assert (part.arrival_s < now_s).all()
        taken = taken.then(part)
    return taken


@given(many_users, st.floats(0.01, 3), st.booleans(), st.booleans())
@settings(deadline=None)
def test_replay_in_steps_gives_what_one_take_gives(
    users: list[int], time_scale: float, loop: bool, jitter: bool
) -> None:
    workload = TraceWorkload(growing_trace(users), time_scale=time_scale, loop=loop)
    taken = []
    for step_s in (10_000.0, 7.3):
        start = workload.redraw if jitter else workload.reset
        start(np.random.default_rng(5), -20.0)
        taken.append(played(workload, 150.0, step_s))
    assert rows(taken[0]) == rows(taken[1])
    assert (np.diff(taken[0].arrival_s) >= 0).all()
    assert not taken[0].user.size or taken[0].user.max() < workload.persistent_users


def test_start_of_the_clock_is_the_start_of_the_trace() -> None:
    trace = growing_trace([0, 1, 0, 2, 0], seconds=8.0)
    workload = TraceWorkload(trace, time_scale=0.5, loop=False)
    workload.reset(np.random.default_rng(0), -2.0)
    assert workload.take(0.0).arrival_s.tolist() == [-2, -1]
    assert rows(workload.take(2.0)) == [(0, 0, 2, 1), (1, 2, 1, 1)]
    assert rows(workload.take(2.0)) == []
    assert rows(workload.take(1e9)) == [(2, 0, 3, 1)]
    assert rows(workload.take(2e9)) == []


def test_loop_goes_on_growing() -> None:
    trace = growing_trace([0, 1, 0], seconds=2.0)
    workload = TraceWorkload(trace, max_history_tokens=6)
    assert trace.duration_s == 3.0
    taken = workload.take(12.0)
    assert taken.arrival_s.tolist() == list(range(12))
    assert by_user(taken)[1] == [(1, 1), (2, 1), (3, 1), (4, 1)]
    # Past 6 tokens a quarter goes: 7 - 1.
    assert [length for length, _ in by_user(taken)[0]] == [1, 2, 3, 4, 5, 6, 6, 6]
    workload.reset(np.random.default_rng(0), 0.0)
    assert rows(workload.take(12.0)) == rows(taken)


def test_loop_keeps_static_lists_and_repeats_prompts(tmp_path: Path) -> None:
    books = TraceWorkload(read_trace(write(tmp_path, "0 10 11 12\n"), duration_s=3600))
    assert by_user(books.take(9000.0))[0][:6] == [(3, 3)] + [(3, 0)] * 5
    prompts = [(0, 900, [0, 1]), (3000, 700, [0, 1])]
    text = "".join(
        json.dumps({"timestamp": t, "input_length": n, "hash_ids": ids}) + "\n"
        for t, n, ids in prompts
    )
    trace = read_trace(write(tmp_path, text))
    assert not trace.histories_grow
    workload = TraceWorkload(trace, max_history_tokens=800)
    taken = workload.take(4 * trace.duration_s)
    assert taken.history_length.tolist() == [800, 700] * 4


@given(many_users, st.integers(0, 99), st.floats(0, 30))
@settings(deadline=None)
def test_jitter_keeps_each_users_histories_in_order(
    users: list[int], seed: int, jitter_s: float
) -> None:
    trace = with_base_histories(growing_trace(users), [5, 9], seed, 1.0, 12)
    workload = TraceWorkload(trace, max_history_tokens=12, jitter_s=jitter_s)
    workload.reset(np.random.default_rng(seed), 0.0)
    end_s = 2 * trace.duration_s
    plain = workload.take(end_s)
    workload.redraw(np.random.default_rng(seed), 0.0)
    moved = workload.take(end_s)
    assert (np.diff(moved.arrival_s) >= 0).all()
    assert moved.arrival_s[0] >= 0
    assert by_user(moved) == by_user(plain)
    # Sorting keeps the largest move of any rank within the jitter.
    assert np.abs(moved.arrival_s - plain.arrival_s).max() <= jitter_s + 1e-9


def test_redraws_differ_and_repeat_by_seed() -> None:
    workload = TraceWorkload(growing_trace([0, 1, 2] * 20))
    arrivals = []
    for seed in (1, 2, 1):
        workload.redraw(np.random.default_rng(seed), 0.0)
        arrivals.append(workload.take(90.0).arrival_s.tolist())
    assert arrivals[0] == arrivals[2] != arrivals[1]


def test_taken_arrays_are_the_callers_own() -> None:
    trace = growing_trace([0, 0, 0])
    workload = TraceWorkload(trace)
    digest = trace.digest()
    taken = workload.take(1000.0)
    taken.history_length[:] = 7
    taken.user[:] = 7
    assert trace.digest() == digest
    workload.reset(np.random.default_rng(0), 0.0)
    assert workload.take(1000.0).user.max() == 0


def test_scaled_to_a_rate() -> None:
    workload = TraceWorkload(growing_trace([0, 1] * 500), Catalogue(zipf=0.4), jitter_s=0.5)
    fast = workload.scaled_to(200.0)
    assert fast.mean_requests_per_s == pytest.approx(200.0)
    assert len(fast.take(50.0)) == pytest.approx(10_000, abs=2)
    assert (fast.catalogue, fast.jitter_s) == (workload.catalogue, 0.5)
    assert fast.digest() != workload.digest()
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ArgumentError):
            workload.scaled_to(rate)


@pytest.mark.parametrize(
    "values",
    [
        {"time_scale": 0.0},
        {"time_scale": float("nan")},
        {"time_scale": -1.0},
        {"max_history_tokens": 0},
        {"jitter_s": -0.1},
        {"jitter_s": float("inf")},
    ],
)
def test_workload_refuses(values: dict[str, float]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(values))):
        TraceWorkload(growing_trace([0]), **values)  # type: ignore[arg-type]


def test_to_json_names_the_file_and_digest_follows_the_content(tmp_path: Path) -> None:
    path = write(tmp_path, MOVIES)
    workload = TraceWorkload(read_trace(path))
    values = json.loads(json.dumps(workload.to_json()))
    assert (values["kind"], values["format"], values["file"]) == (
        "trace",
        "movietweetings",
        "trace.txt",
    )
    assert values["path"] == str(path)
    assert values["digest"] == workload.trace.digest()
    copy = TraceWorkload(read_trace(write(tmp_path, MOVIES, "copy.txt")))
    assert copy.digest() == workload.digest()
    other = TraceWorkload(read_trace(write(tmp_path, MOVIES.replace("1000", "1001"), "other.txt")))
    assert other.digest() != workload.digest()


# The public sets

# file, requests, users, items, top-5 % users' share, top-10 % items' share, Zipf exponent
PUBLISHED = [
    ("movietweetings-100k.dat", 100_000, 16_500, 10_500, 0.405, 0.740, 0.89),
    ("taobao-userbehavior-2h.csv", 96_000, 58_700, 75_400, 0.165, 0.248, 0.37),
    ("taobao-userbehavior-users-10k.csv", 10_000, 114, None, 0.184, None, None),
    ("amazon-video-games.txt", 287_000, 31_000, 23_700, 0.230, 0.545, 0.69),
    ("amazon-books-sets.txt", 603_000, 52_600, 82_600, 0.260, 0.443, 0.61),
    ("mooncake-conversation.jsonl", 12_031, None, None, None, 0.339, 0.57),
]


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda row: row[0])
def test_published_figures(
    published: tuple[str, int, int, int, float, float, float], shared: Callable[[str], Path]
) -> None:
    name, requests, users, items, users_share, items_share, zipf = published
    trace = read_trace(shared(name))
    assert len(trace) == pytest.approx(requests, abs=500 if requests > 20_000 else 0)
    assert trace.skipped == 0
    if users is not None:
        assert trace.users == pytest.approx(users, abs=60 if users > 1000 else 0)
        assert trace.top_users_share() == pytest.approx(users_share, abs=0.001)
    if items is not None:
        assert trace.metadata["items"] == pytest.approx(items, abs=50)
    if items_share is not None:
        assert trace.metadata["top_10_items_share"] == pytest.approx(items_share, abs=0.0006)
        assert trace.metadata["item_zipf"] == pytest.approx(zipf, abs=0.0051)


def test_published_times(shared: Callable[[str], Path]) -> None:
    movies = read_trace(shared("movietweetings-100k.dat"))
    assert movies.duration_s / 86_400 == pytest.approx(185, abs=1)
    assert movies.mean_requests_per_s * 3600 == pytest.approx(22.5, abs=0.05)
    assert read_trace(shared("taobao-userbehavior-2h.csv")).duration_s / 60 == pytest.approx(
        115, abs=1
    )
    prompts = read_trace(shared("mooncake-conversation.jsonl"))
    assert prompts.duration_s / 60 == pytest.approx(59, abs=0.1)
    # All users' prompts together reuse 0.366 of their blocks; a user's own last prompt most of it.
    reused = 1 - prompts.new_items.sum() / prompts.history_length.sum()
    assert 0.3 < reused < 0.366


def test_synthetic_lengths_from_the_published_counts(shared: Callable[[str], Path]) -> None:
    counts = read_user_counts(shared("taobao-mobile-user-counts.csv"))
    assert (counts.size, int(np.median(counts)), int(counts.max())) == (10_000, 747, 31_030)
    assert counts.mean() == pytest.approx(1226, abs=0.5)
    assert np.percentile(counts, 95) == pytest.approx(3961, abs=1)
    native = read_trace(shared("taobao-userbehavior-2h.csv"))
    trace = with_base_histories(native, counts, 0)
    assert trace.history_length[trace.is_first].mean() == pytest.approx(9100, rel=0.01)
    assert trace.history_length.max() == 15_000
    drawn = with_base_histories(native, None, 0)
    assert drawn.history_length[drawn.is_first].mean() == pytest.approx(9100, rel=0.05)


def test_published_hourly_curve(shared: Callable[[str], Path]) -> None:
    hourly = read_hourly(shared("taobao-mobile-hourly.csv"))
    assert hourly.size == 744
    assert hourly.max() / hourly.mean() == pytest.approx(3.33, abs=0.01)
    trace = read_trace(shared("amazon-video-games.txt"), hourly=shared("taobao-mobile-hourly.csv"))
    drawn = np.bincount((trace.arrival_s // 3600).astype(int), minlength=744)[:744]
    assert np.corrcoef(drawn, hourly)[0, 1] > 0.99
