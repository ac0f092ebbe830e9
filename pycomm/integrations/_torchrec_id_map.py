"""An id map for TorchRec's tables that gives a new id a row of its own at once."""

from __future__ import annotations

from typing import Any

import torch

from pycomm._native import loader
from pycomm.integrations._torchrec_sharders import import_torchrec

import_torchrec()
from torchrec.modules.mc_modules import ManagedCollisionModule  # noqa: E402
from torchrec.sparse.jagged_tensor import JaggedTensor  # noqa: E402

_INPUT_SIZE = 2**63 - 1
_FREE = -1


class LRUManagedCollisionModule(ManagedCollisionModule):  # type: ignore[misc]
    """Gives each id a row of its own at once; if none is free, that of the least recently used id.

    For ``torchrec.modules.mc_modules.ManagedCollisionCollection``, in place of
    ``MCHManagedCollisionModule``. Ids are any int64 from 0. They are mixed, so that the ranks of a
    row-wise table get equally many, whatever the ids are. A step never takes the row of an id that
    it uses. The first step, also after loading, allocates all memory and sorts the rows; no other
    step sorts or grows.

    Mixed ids are divided into ``buckets`` equal ranges, and rows likewise. A bucket's last row is
    shared by ids without a row of their own: those not admitted yet, those that ``eval()`` meets
    for the first time, and those of a step that needs more rows than the bucket has.

    Example::

        id_map = LRUManagedCollisionModule(zch_size=100_000, admit_after=2)
        collection = ManagedCollisionCollection({"user": id_map}, tables)

    Args:
        zch_size: Rows of the table, ``num_embeddings`` of its config; a multiple of ``buckets``.
            Some buckets are full a little before others: reserve 3 % more rows than ids, and 10 %
            below 50,000 rows.
        device: Of the table: the CPU, or "meta" before sharding.
        admit_after: How often an id must be seen before it has a row.
        buckets: A power of two, 1,024 at most. The number of ranks must divide it, also that of
            ranks that load a checkpoint.
        output_global_offset, output_segments: For TorchRec's own use.

    Raises:
        ValueError: An argument is wrong.
        torch.distributed.DistBackendError: In a step: an id is negative.

    Thread: one at a time. Memory: about 60 bytes per row, 120 with ``admit_after``.
    """

    def __init__(
        self,
        zch_size: int,
        device: torch.device | str = "cpu",
        *,
        admit_after: int = 1,
        buckets: int = 16,
        output_global_offset: int = 0,
        output_segments: list[int] | None = None,
    ) -> None:
        if buckets < 1 or buckets > 1024 or buckets & (buckets - 1):
            raise ValueError(f"buckets={buckets} is not a power of two from 1 to 1024")
        if admit_after < 1:
            raise ValueError(f"admit_after={admit_after}: an id must be seen once at least")
        all_rows = zch_size if output_segments is None else output_segments[-1]
        if all_rows % buckets or all_rows < 2 * buckets:
            raise ValueError(
                f"a table of {all_rows} rows cannot be divided into {buckets} equal buckets of 2 "
                f"rows or more. Try: {max(2, -(-all_rows // buckets)) * buckets} rows"
            )
        rows = all_rows // buckets
        if zch_size % rows or output_global_offset % rows:
            raise ValueError(
                f"rows {output_global_offset} to {output_global_offset + zch_size} of {all_rows} "
                f"are not whole buckets: the number of ranks must divide buckets={buckets}"
            )
        device = torch.device(device)
        if device.type not in ("cpu", "meta"):
            raise ValueError(f"device {device}: this id map works on the CPU only")
        # Those of all buckets, so that any number of ranks can load what another has saved.
        super().__init__(device, [rows * number for number in range(buckets + 1)])
        self._segments = self._output_segments_tensor.clone()
        self._rows = zch_size
        self._offset = output_global_offset
        self._bucket_rows = rows
        self._all_buckets = buckets
        self._admit_after = admit_after
        names = ["_ids", "_last_uses"]
        if admit_after > 1:
            names += ["_candidate_ids", "_candidate_last_uses", "_candidate_counts"]
        for name in names:
            fill = _FREE if name.endswith("_ids") else 0
            tensor = torch.full((zch_size,), fill, dtype=torch.int64, device=device)
            self.register_buffer(name, tensor)
        self._state_names = names
        self._map: Any = None
        self._map_state: list[tuple[int, int]] = []
        self._replaced: list[torch.Tensor] = []  # by maps that were made before this one
        self._turned_away = 0  # the same

    def _id_map(self) -> Any:
        """Of the buffers as they are: ``to()``, ``share_memory()`` and loading may have replaced
        them, moved them or written to them."""
        state = [getattr(self, name) for name in self._state_names]
        seen = [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in state]
        if self._map is None or seen != self._map_state:
            if self._map is not None:
                self._replaced.append(self._map.take_replaced())
                self._turned_away += self._map.turned_away
            self._map = loader.load().IdMap(
                state,
                rows=self._rows,
                buckets=self._rows // self._bucket_rows,
                first_bucket=self._offset // self._bucket_rows,
                all_buckets=self._all_buckets,
                admit_after=self._admit_after,
            )
            self._map_state = seen
        return self._map

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None, "_map_state": []}  # made again from the buffers

    def preprocess(self, features: dict[str, Any]) -> dict[str, Any]:
        """Mixes ids, before they go to the ranks that own them."""
        mix = loader.load().mix_ids
        return {
            name: _with_values(each, mix(each.values().contiguous()))
            for name, each in features.items()
        }

    def profile(self, features: dict[str, Any]) -> dict[str, Any]:
        """In training, gives rows to the new ids among these mixed ones."""
        if self.training:
            values = [each.values() for each in features.values()]
            together = values[0] if len(values) == 1 else torch.cat(values)
            self._id_map().learn(together.contiguous())
        return features

    def remap(
        self,
        features: dict[str, Any],
        mutate_miss_lengths: bool = True,
        write_weights: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """The rows of mixed ids."""
        found = self._id_map()
        return {
            name: _with_values(each, found.find(each.values().contiguous()) + self._offset)
            for name, each in features.items()
        }

    def forward(self, features: dict[str, Any], mutate_miss_lengths: bool = True) -> dict[str, Any]:
        """The rows of ids: all three steps above."""
        return self.remap(self.profile(self.preprocess(features)))

    def evict(self) -> torch.Tensor | None:
        """The rows that have got another id since the last call, for which TorchRec resets them."""
        if self._map is None:
            return None
        rows: Any = torch.cat([*self._replaced, self._map.take_replaced()])
        self._replaced = []
        return rows.unique() + self._offset if len(rows) else None

    def output_size(self) -> int:
        return self._rows

    def input_size(self) -> int:
        return _INPUT_SIZE

    def buckets(self) -> int:
        return self._all_buckets

    def open_slots(self) -> torch.Tensor:
        """How many more ids can have a row."""
        own = self._rows // self._bucket_rows
        return torch.tensor([self._rows - own - self._id_map().used])

    @property
    def turned_away(self) -> int:
        """Ids that found their bucket full of ids of the same step, since this process began."""
        return self._turned_away + int(self._id_map().turned_away)

    def validate_state(self) -> None:
        """After loading.

        Raises:
            ValueError: The loaded state has other buckets.
        """
        if not torch.equal(self._output_segments_tensor, self._segments):
            raise ValueError(
                "the state that was loaded is of an id map with another number of rows or buckets, "
                "or of another class"
            )
        self._map = None
        self._replaced = []

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int],
        device: torch.device | None = None,
    ) -> LRUManagedCollisionModule:
        """One rank's part of this map; TorchRec calls it."""
        begin, end = output_id_range
        return type(self)(
            end - begin,
            self.device if device is None else device,
            admit_after=self._admit_after,
            buckets=self._all_buckets,
            output_global_offset=begin,
            output_segments=output_segments,
        )


def _with_values(feature: Any, values: torch.Tensor) -> Any:
    return JaggedTensor(
        values=values,
        lengths=feature.lengths(),
        offsets=feature.offsets(),
        weights=feature.weights_or_none(),
    )
