"""`python -m dcprt.launch_server`: the API server, and the parent of all other processes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dcprt.config import Config, ServerConfig, parse_args
from dcprt.errors import ConfigError, DcprtError

if TYPE_CHECKING:
    from dcprt.planner.deployment import Deployment
    from dcprt.server.service import Service

DRAIN_S = 3.0
"""How long running requests may go on after Ctrl-C."""


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket, before anything heavy starts.

    Raises:
        ConfigError: the port is busy or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((config.host, config.port))
    except (OSError, OverflowError) as error:
        sock.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"Port {config.port} on {config.host} is busy. Choose another with --port, or --port 0 for a free one."
            ) from error
        raise ConfigError(f"Cannot listen on {config.host}:{config.port}: {error}.") from error
    sock.listen(2048)
    return sock


async def serve(config: Config, sock: socket.socket, log: logging.Logger) -> int:
    """Serve until a signal or a failure; returns the exit status."""
    import uvicorn

    from dcprt.server.app import build_app
    from dcprt.server.service import Service

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # signals are handled here, for all processes together

    service = Service()
    app = build_app(service, config.server.api_key)
    server = Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1))
    http = asyncio.create_task(server.serve(sockets=[sock]))
    stop = _on_signals()
    status = 0
    try:
        status = await _run(config, service, sock, stop, log)
    finally:
        service.stopping = True
        if service.runtime is not None:
            await service.runtime.close()
        server.should_exit = True
        await http
    return status


async def _run(config: Config, service: Service, sock: socket.socket, stop: asyncio.Event, log: logging.Logger) -> int:
    """Start the model, say so, and wait for the end."""
    from dcprt.runtime.prepare import prepare
    from dcprt.runtime.runtime import Runtime

    deployment = await asyncio.to_thread(prepare, config, log.info)
    for line in _describe(deployment):
        log.info("%s", line)
    runtime = service.runtime = Runtime(deployment)
    runtime.start()
    stopped = asyncio.create_task(stop.wait())
    ready = asyncio.create_task(runtime.ready())
    await asyncio.wait((stopped, ready), return_when=asyncio.FIRST_COMPLETED)
    if not ready.done():
        ready.cancel()
        return 0
    ready.result()
    log.info("%s", _ready_line(deployment, sock, config.server.api_key))
    await asyncio.wait((stopped, runtime.supervisor.failure), return_when=asyncio.FIRST_COMPLETED)
    if runtime.supervisor.failure.done():
        log.error("%s; the server ends.", runtime.supervisor.failure.result())
        stopped.cancel()
        return 1
    service.stopping = True
    if service.live:
        log.info("stopping; %d request(s) may finish within %.0f s", service.live, DRAIN_S)
    for _ in range(int(DRAIN_S / 0.05)):
        if not service.live:
            break
        await asyncio.sleep(0.05)
    return 0


def _on_signals() -> asyncio.Event:
    """Set by the first Ctrl-C or SIGTERM. A second one ends this process, and with it all others, at once."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop


def _describe(deployment: Deployment) -> list[str]:
    from dcprt.planner import host
    from dcprt.planner.capacity import page_bytes
    from dcprt.planner.grid_report import describe_grid

    options = deployment.config.grid
    shape = (deployment.spec, deployment.grid, deployment.layout, deployment.dtype)
    mebibytes = deployment.num_pages * page_bytes(*shape) / 2**20
    slower = [] if host.has_kernels() else ["dcprt-kernel is not installed: torch and gloo do its work, slower"]
    return [
        *describe_grid(*shape, replicate_q=options.dcp_replicate_q, ep=options.ep),
        f"KV cache: {deployment.capacity_tokens:,} tokens, up to {mebibytes:,.0f} MiB a rank, taken as it is used",
        f"{deployment.dtype}, {deployment.comm} collectives, {deployment.threads} thread(s) a rank",
        *slower,
    ]


def _ready_line(deployment: Deployment, sock: socket.socket, api_key: str | None) -> str:
    host, port = sock.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    auth = " -H 'Authorization: Bearer KEY'" if api_key else ""
    if deployment.config.model.skip_tokenizer_init:
        path, body = "/generate", '{"input_ids": [1, 2, 3]}'
    else:
        path = "/v1/chat/completions"
        body = '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    return (
        f"ready: {url} serves {deployment.model_name} on tp {deployment.grid.tp}, dcp {deployment.grid.dcp}, "
        f"KV for {deployment.capacity_tokens:,} tokens; try: "
        f"curl -s {url}{path} -H 'Content-Type: application/json'{auth} -d '{body}'"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, bind, serve; a user's mistake is one line and exit status 2."""
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # before `serve` took the signals over
        return 0


def _main(argv: Sequence[str]) -> int:
    try:
        config = parse_args(argv)
        sock = bind(config.server)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    import uvloop

    from dcprt.runtime import logs

    log = logs.setup("api", config.server.log_level)
    try:
        return uvloop.run(serve(config, sock, log))
    except DcprtError as error:
        log.error("%s", error)
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())
