"""What of a worker's step is recorded, where `--profile-steps` asks for it; without it nothing here is used.

The parts of a worker are replaced by ones that record and pass on, so that their own code knows nothing of it. The one
exception is a native call for all layers, which notes itself when their parts end (`models/whole.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any, cast

from torch import Tensor

from dcprt.attention.backend import AttentionBackend
from dcprt.comm.groups import Groups
from dcprt.comm.protocol import Collective
from dcprt.kv.pool import KVPool, LayerKV
from dcprt.messages import StepPlan, StepResult
from dcprt.models.base import Model, StepInput
from dcprt.trace import STEP, Part, Recorder, clock
from dcprt.weights.loader import Loader

Poll = Callable[[bool], list[StepPlan]]
Execute = Callable[[StepPlan], StepResult]
Send = Callable[[Sequence[object]], None]

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")
ATTENTION = MappingProxyType(
    {
        "context": Part.CONTEXT,
        "new_tokens": Part.NEW_TOKENS,
        "dense": Part.GATHERED_KV,
        "paged": Part.CONTEXT_AND_NEW_TOKENS,
    }
)
PRODUCTS = MappingProxyType(
    {"__call__": Part.LINEAR, "normed": Part.NORM_AND_LINEAR, "gated": Part.NORM_AND_MLP, "rows": "embedding rows"}
)
HEAD_PRODUCTS = MappingProxyType({"__call__": "linear of heads"})


class StepProfile:
    """Records the steps of one worker.

    A step is `prepare` (copies, rows, tensors), `forward` with its layers, `logits`, and `sample`, which is all that
    comes after the last logits.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._begin = self._scored = 0
        self._done: int | None = None

    def groups(self, groups: Groups) -> Groups:
        """The same groups, recorded."""
        return Groups(self._collective(groups.world), self._collective(groups.dcp))

    def backend(self, backend: AttentionBackend) -> AttentionBackend:
        """The same passes, recorded."""
        return self._recorder.traced(backend, ATTENTION)

    def loader(self, load: Loader) -> Loader:
        """One whose matrices record their products."""
        return cast(Loader, _TracedLoader(load, self._recorder))

    def model(self, model: Model) -> Model:
        """The same model, recorded."""
        return _TracedModel(model, self)

    def pool(self, pool: KVPool) -> KVPool:
        """One that records the time between its layers, where the forward pass goes through them one by one."""
        return cast(KVPool, _TracedPool(pool, self._recorder))

    def loop(self, poll: Poll, execute: Execute, send: Send) -> tuple[Poll, Execute, Send]:
        """The calls of the worker's loop, recorded; what was before is forgotten."""
        self._recorder.clear()
        receive = self._recorder.wrap("receive plan", poll)

        def polled(wait: bool) -> list[StepPlan]:
            self._write()
            return receive(wait)

        def executed(plan: StepPlan) -> StepResult:
            self._write()
            self._begin = self._scored = clock()
            result = execute(plan)
            end = clock()
            if self._scored > self._begin:
                self._recorder.add("sample", self._scored, end)
            self._recorder.add(STEP, self._begin, end)
            self._done = plan.number
            return result

        return polled, executed, self._recorder.wrap("send result", send)

    def forward(self, model: Model, step: StepInput, kv: KVPool) -> Tensor:
        """`model.forward`; what came before it is `prepare`."""
        begin = clock()
        self._recorder.add("prepare", self._begin, begin)
        hidden = model.forward(step, kv)
        self._recorder.add("forward", begin, clock())
        return hidden

    def logits(self, model: Model, hidden: Tensor) -> Tensor:
        """`model.logits`."""
        begin = clock()
        logits = model.logits(hidden)
        self._scored = clock()
        self._recorder.add("logits", begin, self._scored)
        return logits

    def _write(self) -> None:
        """What has been recorded of the step before, its result sent."""
        if self._done is not None:
            self._recorder.end_step(self._done)
            self._done = None

    def _collective(self, group: Collective) -> Collective:
        if group.size == 1:
            return group
        return self._recorder.traced(group, {name: Part.collective(name, group.name) for name in COLLECTIVES})


class _TracedModel:
    def __init__(self, model: Model, profile: StepProfile) -> None:
        self.spec = model.spec
        self._model = model
        self._profile = profile

    def forward(self, step: StepInput, kv: KVPool) -> Tensor:
        return self._profile.forward(self._model, step, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._profile.logits(self._model, hidden)


class _TracedPool:
    """Each layer's KV is asked for when the layer begins, and the next one's when it has ended."""

    def __init__(self, pool: KVPool, recorder: Recorder) -> None:
        self.descriptor, self.pairs = pool.descriptor, pool.pairs
        self.copy = recorder.wrap("copy pages", pool.copy)
        self._names = [f"layer {i}" for i in range(len(pool.layers))]
        self._pool = pool
        self._recorder = recorder

    @property
    def layers(self) -> Iterator[LayerKV]:
        for name, layer in zip(self._names, self._pool.layers, strict=True):
            begin = clock()
            yield layer
            self._recorder.add(name, begin, clock())


class _TracedLoader:
    def __init__(self, load: Loader, recorder: Recorder) -> None:
        self._load = load
        self._recorder = recorder

    def matrix(self, *args: Any, **kwargs: Any) -> Any:
        return self._recorder.traced(self._load.matrix(*args, **kwargs), PRODUCTS)

    def head_matrix(self, *args: Any, **kwargs: Any) -> Any:
        return self._recorder.traced(self._load.head_matrix(*args, **kwargs), HEAD_PRODUCTS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._load, name)
