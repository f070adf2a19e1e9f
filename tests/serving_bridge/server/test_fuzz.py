"""Some hundred malformed requests; `python -m eval.fuzz_server` sends thousands and looks at memory."""

from eval.fuzz_server import LIMITS, fuzz
from eval.server_process import server_process


def test_malformed_requests_do_no_harm() -> None:
    with server_process(LIMITS) as server:
        outcome = fuzz(server, 400, seed=7)
    assert outcome.faults == []
    assert outcome.rest.total() == 300 and outcome.grpc.total() == 100
    assert outcome.rest["400"] > 100 and outcome.grpc["INVALID_ARGUMENT"] > 50
