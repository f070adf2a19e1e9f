"""A node with the fake scorer as a process of its own, for tests of signals.

    python -m tests.serving_bridge.server.node_program DRAIN_SECONDS

It prints its ports; a user named "slow" is answered half a second after the node was told to stop, one
named "never" never.
"""

import asyncio
import sys
import threading
import time
from concurrent.futures import Future

from serving_bridge.scoring import Scored, ScoreRequest
from serving_bridge.server.lifecycle import Listen, NodeServer, serve_until_signal
from tests.serving_bridge.server.fake_node import FakeScorer


class SlowScorer(FakeScorer):
    def submit(self, request: ScoreRequest) -> Future[Scored]:
        self.hold = request.user in ("slow", "never")
        future = super().submit(request)
        if request.user == "slow":
            threading.Thread(target=self.answer_late, args=(request, future), daemon=True).start()
        if self.hold:
            print("held", flush=True)
        return future

    def answer_late(self, request: ScoreRequest, future: Future[Scored]) -> None:
        while not self.drained:
            time.sleep(0.01)
        time.sleep(0.5)
        self._answer(request, future)


def main() -> int:
    server = NodeServer(SlowScorer(), Listen(port=0, grpc_port=0, drain_s=float(sys.argv[1])))

    def started(server: NodeServer) -> None:
        print(server.port, server.grpc_port, flush=True)

    code = asyncio.run(serve_until_signal(server, started))
    print("closed", flush=True)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
