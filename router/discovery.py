"""Serve tells this process which replicas run; this class writes them into the table of seats.

Serve pickles this module by value, objects it imported by name included. So the table is reached
through its module, which is pickled by name: `seats.TABLE`, never `from ... import TABLE`. This is
the one place that touches Serve's request-router interface, which is alpha: the Ray version is
pinned, and a test fails when the interface changes.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

from router import seats


class PinRouter(RequestRouter):
    """Routes control calls: to the replica named by `session_id`, else to each in turn."""

    def initialize_state(self, **_: Any) -> None:
        """Called once by Serve."""
        self._turn = 0

    def update_replicas(self, replicas: list[Any]) -> None:
        """Serve's controller pushed the replicas that run and accept requests."""
        super().update_replicas(replicas)
        found = []
        for replica in replicas:
            told = replica.replica_metadata or {}
            if "host" in told and "port" in told:
                key = replica.replica_id.unique_id
                found.append(seats.Seat(key=key, host=told["host"], port=int(told["port"])))
        seats.TABLE.fill(self._deployment_id.name, found)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """A call found the replica's process gone, before the controller did."""
        super().on_replica_actor_died(replica_id)
        seats.TABLE.remove(self._deployment_id.name, replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Settle the request here: the base class mixes up sibling calls, which share an id.

        Must never return an empty list: the caller's loop would spin on it.
        """
        request = pending_request
        if request is None or not candidate_replicas:
            return [candidate_replicas]
        request.routing_context.should_backoff = True
        wanted = request.metadata.session_id
        if wanted:
            found = [r for r in candidate_replicas if r.replica_id.unique_id == wanted]
        else:
            self._turn += 1
            found = [candidate_replicas[self._turn % len(candidate_replicas)]]
        if not request.future.done():
            if found:
                request.future.set_result(found[0])
            else:
                request.future.set_exception(LookupError(f"replica {wanted} is not running"))
        self._remove_pending_request_from_indices(request)
        return [candidate_replicas]
