"""The process of one rank: plans in, results out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import zmq

from dcprt.errors import ConfigError, DcprtError, RuntimeFailed
from dcprt.ids import Rank
from dcprt.messages import StepPlan, WorkerReady
from dcprt.runtime.channel import Launch
from dcprt.trace import Recorder
from dcprt.wire import Receiver, Sender, endpoint

log = logging.getLogger("dcprt")


def run(launch: Launch, ready: Callable[[], None]) -> None:
    """Load this rank's weights, meet the other ranks, then execute plans until the process is ended."""
    import torch

    _check_kernels()
    from dcprt.comm.groups import connect
    from dcprt.worker.build import build_worker
    from dcprt.worker.profile import StepProfile

    deployment, rank = launch.deployment, Rank(launch.rank)
    torch.set_num_threads(deployment.threads)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    plans: Receiver[StepPlan] = Receiver(context, endpoint(launch.run_dir, f"plans-{rank}"), StepPlan)
    results = Sender(context, endpoint(launch.run_dir, "results"))
    grid = deployment.grid
    groups = connect(deployment.comm, rank, grid.tp, grid.dcp, arenas=launch.arenas, directory=launch.run_dir)
    start = time.monotonic()
    profile = None
    if deployment.config.server.profile_steps is not None:
        profile = StepProfile(Recorder(launch.run_dir, rank, f"rank {rank}"))
    worker = build_worker(deployment, rank, groups, _Progress(), profile)
    log.info("weights loaded in %.1f s (%s)", time.monotonic() - start, deployment.dtype)
    groups.world.barrier()
    ready()
    results.send([WorkerReady(rank=rank)])
    calls = (plans.poll, worker.execute, results.send)
    poll, execute, send = calls if profile is None else profile.loop(*calls)
    while True:
        for plan in poll(True):
            try:
                result = execute(plan)
            except DcprtError as error:
                raise RuntimeFailed(f"failed in step {plan.number}: {error}") from error
            except Exception as error:
                log.exception("failed in step %d", plan.number)
                raise RuntimeFailed(f"failed in step {plan.number}: {type(error).__name__}: {error}") from error
            if rank == 0:
                send([result])


def _check_kernels() -> None:
    """Raises ConfigError: the native kernels cannot use the instruction set that `DCPRT_KERNEL_ISA` names."""
    try:
        import dcprt_kernel.linear  # noqa: F401
    except ImportError:
        return
    except ValueError as error:
        raise ConfigError(str(error)) from error


class _Progress:
    """Says once a second how far a long load is."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._said >= 1 and done < total:
            log.info("loading weights, %d of %d tensors", done, total)
            self._said = now
