"""All ranks as threads of this process: for tests, and for trying an idea without a server."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from dcprt.comm.groups import Groups, local_groups
from dcprt.errors import RuntimeFailed
from dcprt.ids import Rank
from dcprt.messages import StepPlan, StepResult
from dcprt.planner.deployment import Deployment
from dcprt.worker.build import build_worker
from dcprt.worker.worker import Worker


class LocalExecutor:
    """An `Executor` over `local` collectives, or others of this process. Close it, or use it as a context."""

    def __init__(self, deployment: Deployment, groups: Sequence[Groups] | None = None) -> None:
        """`groups`: those of each rank. Raises what building a worker raises."""
        grid = deployment.grid
        self._groups = local_groups(grid.tp, grid.dcp) if groups is None else groups
        with ThreadPoolExecutor(grid.tp) as pool:  # together, since ranks may measure collectives meanwhile
            ranks = map(Rank, range(grid.tp))
            self.workers = list(pool.map(build_worker, [deployment] * grid.tp, ranks, self._groups))
        self._plans: list[queue.Queue[StepPlan | None]] = [queue.Queue() for _ in self.workers]
        self._results: queue.Queue[StepResult | Exception] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._run, args=(rank, worker), name=f"rank {rank}", daemon=True)
            for rank, worker in enumerate(self.workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, plan: StepPlan) -> None:
        """See `Executor.submit`."""
        for plans in self._plans:
            plans.put(plan)

    def result(self) -> StepResult:
        """See `Executor.result`.

        Raises:
            RuntimeFailed: a rank raised; its error is the cause.
        """
        result = self._results.get()
        if isinstance(result, Exception):
            raise RuntimeFailed(f"A worker failed: {result}") from result
        return result

    def close(self) -> None:
        """End the threads."""
        for plans in self._plans:
            plans.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> LocalExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, rank: int, worker: Worker) -> None:
        while (plan := self._plans[rank].get()) is not None:
            try:
                result = worker.execute(plan)
            except Exception as error:  # noqa: BLE001 - the border of this rank: whoever asks for the result gets it
                self._results.put(error)
                return
            if rank == 0:
                self._results.put(result)
