"""A request router of Ray Serve: prompts that begin alike go to the replica whose prefix cache has their beginning.

Named by `request_router_config` in the YAML. `oarlock_ray.prefix` says in a header how a prompt begins.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from oarlock_ray.prefix_choice import OpenRequests, SentPrefixes, ranked

SLACK = 4


class PrefixRouter(RequestRouter):
    """Asks replicas one after another, in the order of `ranked`, until one has room."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._slack = SLACK
        self._sent = SentPrefixes()
        self._open = OpenRequests()

    def initialize_state(self, slack: int = SLACK, **unknown: Any) -> None:
        """Checks `request_router_kwargs`. `slack`: see `ranked`."""
        if unknown or not isinstance(slack, int) or slack < 0:
            raise ValueError(
                "error: request_router_kwargs: there is only `slack`, a whole number from 0.\n"
                f"fix: For example: {{slack: {SLACK}}}"
            )
        self._slack = slack

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._sent.keep({replica.replica_id.unique_id for replica in replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Each replica in a rank of its own, the best first."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        names = random.sample(list(by_name), len(by_name))  # equally good ones in any order
        reported = {name: self.replica_queue_len_cache.get(by_name[name].replica_id) or 0 for name in names}
        chain = _chain(pending_request)
        request = pending_request.metadata.internal_request_id if pending_request is not None else ""
        self._open.choose(request, None)  # forgets the choice of an earlier round, in which none had room
        order = ranked(chain, self._sent.matches(chain), self._open.loads(reported), self._slack)
        with_room = (name for name in order if reported[name] < by_name[name].max_ongoing_requests)
        self._open.choose(request, next(with_room, None))
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # between two rounds in which none had room
        return [[by_name[name]] for name in order]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Ray sends the request as soon as it has the result, and says once when that has ended."""
        request = pending_request.metadata.internal_request_id
        self._open.begin(request)
        try:
            replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        finally:
            self._open.leave(request)
        self._open.send(replica.replica_id.unique_id)
        return replica

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        self._sent.add(_chain(pending_request), replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._open.end(replica_id.unique_id)


def _chain(request: PendingRequest | None) -> list[str]:
    text = request.metadata.session_id if request is not None else ""
    return text.split(",") if text else []
