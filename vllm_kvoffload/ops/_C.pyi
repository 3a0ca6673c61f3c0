import numpy as np
import numpy.typing as npt
import torch

_Int64 = npt.NDArray[np.int64]

class Workspace:
    def __init__(self) -> None: ...

class Residency:
    def __init__(
        self,
        tags: torch.Tensor,
        ages: torch.Tensor,
        hands: torch.Tensor,
        high: torch.Tensor,
        policy: str,
        placement: str = "one_set",
    ) -> None: ...

class PlanOut:
    def __init__(
        self,
        slots: torch.Tensor,
        new_slots: torch.Tensor,
        miss_ids: torch.Tensor,
        miss_slots: torch.Tensor,
        miss_counts: torch.Tensor,
        stats: torch.Tensor,
        kinds: torch.Tensor,
        miss_positions: torch.Tensor,
    ) -> None: ...

def dsa_plan(
    topk: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    residency: Residency,
    out: PlanOut,
    workspace: Workspace,
) -> None: ...
def dsa_serve(
    host: torch.Tensor,
    hot: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    miss_ids: torch.Tensor,
    miss_slots: torch.Tensor,
    miss_counts: torch.Tensor,
) -> int: ...
def dsa_serve_compact(
    kinds: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    host: torch.Tensor,
    hot: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    new_rows: torch.Tensor,
    selection: torch.Tensor,
) -> int: ...
def dsa_install(
    selection: torch.Tensor,
    query_start_loc: torch.Tensor,
    rows: torch.Tensor,
    miss_positions: torch.Tensor,
    miss_slots: torch.Tensor,
    miss_counts: torch.Tensor,
    hot: torch.Tensor,
) -> int: ...
def gather_selection(
    topk: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    host: torch.Tensor,
    block_table: torch.Tensor,
    new_rows: torch.Tensor,
    selection: torch.Tensor,
    status: torch.Tensor,
    lengths: torch.Tensor,
) -> int: ...
def gather_reuse(
    status: torch.Tensor,
    rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    lengths: torch.Tensor,
) -> None: ...
def conformance_plan(
    topk: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    residency: Residency,
    id_range: int,
    kinds: torch.Tensor,
    actual: torch.Tensor,
    records: torch.Tensor,
    record_counts: torch.Tensor,
) -> None: ...
def conformance_install(
    query_start_loc: torch.Tensor,
    rows: torch.Tensor,
    residency: Residency,
    id_range: int,
    width: int,
    records: torch.Tensor,
    record_counts: torch.Tensor,
    miss_positions: torch.Tensor,
    miss_slots: torch.Tensor,
    miss_counts: torch.Tensor,
    metadata_update: bool,
) -> None: ...
def write_rows(
    hot: torch.Tensor, rows: torch.Tensor, new_rows: torch.Tensor, slots: torch.Tensor
) -> None: ...
def host_write(host: torch.Tensor, new_rows: torch.Tensor, slot_mapping: torch.Tensor) -> None: ...
def host_read(
    host: torch.Tensor, block_table: torch.Tensor, start: int, count: int, dst: torch.Tensor
) -> None: ...
def copy_spans(
    to: _Int64, source: _Int64, nbytes: _Int64, to_ranges: _Int64, source_ranges: _Int64
) -> int: ...
def policies() -> list[str]: ...
def set_isa(name: str) -> None: ...
def isa() -> str: ...
def available_isas() -> list[str]: ...
