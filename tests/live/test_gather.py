import pytest
import torch

from hlem_env.live.host_tables import HostTables

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dim", [8, 24, 256, 512, 1000])
@pytest.mark.parametrize("n", [1, 5, 4099])
def test_rows_arrive_in_their_order(dim: int, n: int) -> None:
    from hlem_env.live.kernels.gather_triton import gather_rows

    tables = HostTables(1, 5000, dim, torch.float16, seed=3, device="cuda")
    rows = torch.randint(0, 5000, (n,), device="cuda")
    out = torch.full((n + 1, dim), torch.nan, dtype=torch.float16, device="cuda")
    gather_rows(tables.rows, rows, out[:n])
    assert torch.equal(out[:n], tables.expected(rows))
    assert out[n].isnan().all()


@pytest.mark.parametrize("programs", [1, 3, 64])
def test_resident_and_negative_rows_are_not_staged(programs: int) -> None:
    from hlem_env.live.kernels.gather_triton import stage_rows

    tables = HostTables(1, 500, 32, torch.float16, seed=3, device="cuda")
    slot_of = torch.full((501,), -1, dtype=torch.int32, device="cuda")
    slot_of[::3] = 7
    rows = torch.arange(-20, 480, device="cuda")
    out = torch.full((500, 32), torch.nan, dtype=torch.float16, device="cuda")
    staged = torch.empty_like(rows)
    stage_rows(tables.rows, rows, slot_of, out, staged, programs)
    wanted = (rows >= 0) & (rows % 3 != 0)
    assert torch.equal(staged, torch.where(wanted, rows, -1))
    assert torch.equal(out[wanted], tables.expected(rows[wanted]))
    assert out[~wanted].isnan().all()
