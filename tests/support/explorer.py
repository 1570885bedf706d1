"""Walk the hand-off breadth-first through every state that two requests can bring about.

The world is a router, one prefill replica P with one place for a request, one decode replica D with
two, and a network that delays at will and, within a budget, loses and repeats; P and D may crash.
What the three do on a message is written here, as in the rooms; every change of state goes through
the tables and functions of `common.contract.protocol`, which a mutation replaces. Memory is a tag:
P's place holds in two halves the nonce written there, and a READ copies them at two moments, so
that a READ can be torn, stale or late. With `early`, P offers when its first half is final and the
second is still being written, and D pulls each half as P says that it is.

A request has passes k = 0 and 1: `name = 2 * request + k`, `nonce = 2 * name + serial`; the serial
tells two tickets of one name apart. A state is made of ints and strings only. It is sorted where
order means nothing, and of it and its mirror image (the requests exchanged) the smaller one counts.

Longer than 300 lines because the walked world, its events and its invariants are one model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from common.contract.protocol import ENDED, RULES, Event, Leased, Rules, State, move, step

FINAL = (State.FINISHED, State.FAILED)
RENEWED_BY_ROUTER = (State.WAITING, State.PREFILLING, State.HANDING)
NOBODY = -1
CHANNEL = {
    "reserve": "RD", "decode": "RD", "cancel seat": "RD", "release seat": "RD",
    "prefill": "RP", "cancel": "RP", "release": "RP",
    "granted": "DR", "accepted": "DR", "refused": "DR", "gone": "DR", "finish": "DR",
    "ticket": "PR", "failed": "PR", "claim": "DP", "claimed": "PD",
    "offered": "PR", "pull": "RD", "await": "DP", "ready": "PD",
}  # fmt: skip

BRANCHES = {  # what may differ when a message is delivered
    "ticket": ("hand", "complete"),  # the first token was the last one
    "claimed": ("", "late"),  # too little of the lease is left
    "ready": ("", "late"),
}
UNSEALED = (State.OFFERED, State.PULLING)  # where a pull stands that no job has joined

State_ = tuple[object, ...]


class Broken(AssertionError):
    """An invariant does not hold."""


class Later(Exception):
    """This action cannot happen now."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """How much may go wrong. Channels may be `ordered`, and there may be no `leases`."""

    losses: int = 0
    repeats: int = 0
    crashes: int = 0
    expiries: int = 0
    ordered: bool = False
    leases: bool = True
    in_flight: int = 4


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What the three do besides moving states; a mutation drops one."""

    router_cancels: bool = True  # in every room it asked, when a request ends early
    receiver_tells: bool = True  # the owner how a ticket ended
    receiver_compares: bool = True  # what arrived with the seal
    receiver_remembers: bool = True  # which tickets it took
    receiver_reserves: bool = True  # takes a request only for a reservation it granted
    router_counts: bool = True  # passes
    owner_looks: bool = True  # whether a ticket is live before it frees its place
    owner_waits: bool = True  # until a half is final before it says so
    receiver_joins: bool = True  # a job to the pull of its ticket, instead of reading anew
    receiver_seals: bool = True  # uses nothing that was pulled before its seal came
    receiver_stops: bool = True  # pulls no more once the reservation ended
    receiver_rests: bool = True  # lets go of a pull between two READs at once


@dataclass
class Draft:
    """A state while one action changes it."""

    routers: (
        list  # per request: [state, k, seat, seat's epoch, P's epoch when asked, nonce, endings]
    )
    tickets: dict  # live at P: nonce -> state
    place: list  # P's memory: [owner's nonce, halves that are final, first half, second half]
    seats: dict  # at D: name -> [state, cell, nonce, receiver's state]
    cells: list  # D's memory: [state, owner's name, first half, second half]
    reads: dict  # begun and not over: cell -> (nonce, halves landed, halves posted)
    messages: list
    epochs: list  # [P's, D's, P's as D knows it]
    marks: list  # bit sets of nonces: [taken at D, ever taken, ever made, of a dead P, sealed]
    left: list  # of the budget: [losses, repeats, crashes, expiries]

    def freeze(self, ordered: bool) -> State_:
        return (
            tuple(map(tuple, self.routers)),
            tuple(sorted(self.tickets.items())),
            tuple(self.place),
            tuple(sorted((name, *seat) for name, seat in self.seats.items())),
            tuple(map(tuple, self.cells)),
            tuple(sorted((cell, *read) for cell, read in self.reads.items())),
            tuple(self.messages) if ordered else tuple(sorted(self.messages)),
            tuple(self.epochs),
            tuple(self.marks),
            tuple(self.left),
        )


def thaw(world: State_) -> Draft:
    routers, tickets, place, seats, cells, reads, messages, epochs, marks, left = world
    return Draft(
        [list(router) for router in routers],
        dict(tickets),
        list(place),
        {seat[0]: list(seat[1:]) for seat in seats},
        [list(cell) for cell in cells],
        {read[0]: read[1:] for read in reads},
        list(messages),
        list(epochs),
        list(marks),
        list(left),
    )


def mirror(world: State_) -> State_:
    """The same state with the two requests exchanged."""
    routers, tickets, place, seats, cells, reads, messages, epochs, marks, left = world

    def name(n):
        return n if n == NOBODY else n ^ 2

    def nonce(n):
        return n if n == NOBODY else n ^ 4

    def message(m):
        kind, named, nonced, *rest = m
        return (kind, name(named), nonce(nonced), *rest)

    flipped = [(s, k, name(seat), e, p, nonce(n), ends) for s, k, seat, e, p, n, ends in routers]
    return (
        tuple(flipped[::-1]),
        tuple(sorted((nonce(n), s) for n, s in tickets)),
        (nonce(place[0]), place[1], nonce(place[2]), nonce(place[3])),
        tuple(sorted((name(seat), s, c, nonce(n), r) for seat, s, c, n, r in seats)),
        tuple((s, name(owner), nonce(a), nonce(b)) for s, owner, a, b in cells),
        tuple((c, nonce(n), *halves) for c, n, *halves in reads),
        tuple(sorted(map(message, messages))),
        epochs,
        tuple((mark & 15) << 4 | mark >> 4 for mark in marks),
        left,
    )


@dataclass
class Explorer:
    """One walk under given rules, habits and faults."""

    rules: Rules = RULES
    habits: Habits = Habits()
    faults: Faults = Faults()
    early: bool = False  # offers leave before their memory is final
    rows: Counter = field(default_factory=Counter)  # (table, state, event) -> times taken
    edges: int = 0

    # --- the walk -----------------------------------------------------------------------------

    def walk(self, starts: Sequence[State_] = (), limit: int | None = None) -> list[State_]:
        """Visit all states that can be reached from `starts`, or the first `limit`; returns them.

        Raises:
            Broken: an invariant fails in a state, or some state has no way to an end in which both
                requests ended once and nothing is held. (A state that was reached but not left
                because of the limit counts as a way.)
        """
        order = list(dict.fromkeys(starts or [self.start()]))
        seen = {world: number for number, world in enumerate(order)}
        before: list[list[int]] = [[] for _ in order]  # by number: the states that lead to it
        at = 0
        while at < len(order) and (limit is None or len(order) < limit):
            for label, after in self.successors(order[at]):
                self.edges += 1
                number = seen.get(after)
                if number is None:
                    self.check(after, label)
                    number = seen[after] = len(order)
                    order.append(after)
                    before.append([])
                before[number].append(at)
            at += 1
        good = [number for number, world in enumerate(order) if number >= at or self.is_over(world)]
        reached = set(good)
        while good:
            fresh = [number for number in before[good.pop()] if number not in reached]
            reached.update(fresh)
            good.extend(fresh)
        if len(reached) < len(order):
            stuck = next(world for number, world in enumerate(order) if number not in reached)
            raise Broken(f"no way to a clean end from {stuck}")
        return order

    def start(self, *, alone: bool = False) -> State_:
        """Nothing has happened yet; `alone`: the second request ended before."""
        faults = self.faults
        router = [State.WAITING, 0, NOBODY, 0, 0, NOBODY, 0]
        cell = [State.FREE, NOBODY, NOBODY, NOBODY]
        left = [faults.losses, faults.repeats, faults.crashes, faults.expiries]
        other = [State.FAILED, 0, NOBODY, 0, 0, NOBODY, 1] if alone else router
        draft = Draft(
            [router, other],
            {},
            [NOBODY, 0, NOBODY, NOBODY],
            {},
            [cell, cell],
            {},
            [],
            [1, 1, 1],
            [0] * 5,
            left,
        )
        return self.canonical(draft)

    def moments(self, worlds: Sequence[State_]) -> list[State_]:
        """The first of these states in which things are under way, with this walk's faults to come.

        Faults then strike in the middle of a hand-off without the long way there.
        """
        budget = self.start()[-1]
        firsts = (next(filter(moment, worlds), None) for moment in MOMENTS)
        return [(*world[:-1], budget) for world in firsts if world is not None]

    def canonical(self, draft: Draft) -> State_:
        world = draft.freeze(self.faults.ordered)
        return world if self.faults.ordered else min(world, mirror(world))

    def is_over(self, world: State_) -> bool:
        """Both requests ended once, and nothing is held or on its way."""
        routers, tickets, place, seats, cells, reads, messages, *_ = world
        held = tickets or seats or reads or messages or place[0] != NOBODY
        return (
            not held
            and all(r[0] in FINAL and r[6] == 1 for r in routers)
            and all(c[0] == State.FREE for c in cells)
        )

    def check(self, world: State_, label: str) -> None:
        """The invariants of a single state."""
        routers, tickets, place, seats, cells, reads, _messages, _epochs, marks, _left = world
        for state, k, *_rest, endings in routers:
            _hold(endings == (state in FINAL), f"a request ended {endings} times", label, world)
            _hold(k <= 1, "a request is tried again without end", label, world)
        owners = [nonce for nonce, _ in tickets]
        _hold(
            owners == [n for n in (place[0],) if n != NOBODY],
            "P's place and its tickets disagree",
            label,
            world,
        )
        reading = {cell: nonce for cell, nonce, *_ in reads}
        seated = {}
        for name, state, cell, nonce, receiver in seats:
            seated[cell] = name
            _hold(cells[cell][1] == name, "a seat without its memory", label, world)
            if state == State.TAKEN and receiver == State.RELEASED:
                arrived = cells[cell][2:] == (nonce, nonce) and nonce >> 2 == name >> 1
                _hold(
                    arrived and cell not in reading,
                    "a token from another request's or unverified state",
                    label,
                    world,
                )
                _hold(bool(marks[4] >> nonce & 1), "a token before the seal", label, world)
        for at, (state, owner, *_halves) in enumerate(cells):
            wanted = {State.FREE: False, State.HELD: False}.get(state, True)
            _hold((at in reading) == wanted, "memory and the READs into it disagree", label, world)
            _hold(
                (owner != NOBODY) == (at in seated), "memory is held by nobody's seat", label, world
            )
            _hold(
                (owner != NOBODY) == (state in (State.HELD, State.FETCHING)),
                "memory with a wrong owner",
                label,
                world,
            )

    # --- actions ------------------------------------------------------------------------------

    def successors(self, world: State_) -> Iterator[tuple[str, State_]]:
        """Every action that can happen in a state, and the state it leads to."""
        rooms = (self.router_acts, self.owner_acts, self.receiver_acts, self.network_acts)
        for action, *arguments in (act for acts in rooms for act in acts(world)):
            draft = thaw(world)
            try:
                action(draft, *arguments)
            except Later:
                continue
            if len(draft.messages) <= self.faults.in_flight:
                yield f"{action.__name__} {arguments}", self.canonical(draft)

    def router_acts(self, world: State_) -> Iterator[tuple]:
        owner_epoch, receiver_epoch, _ = world[7]
        for request, (state, _, seat, seat_epoch, asked, *_) in enumerate(world[0]):
            if state in FINAL:
                continue
            yield (self.quit, request)
            if state == State.WAITING and seat == NOBODY:
                yield (self.ask, request)
            if state in (State.HANDING, State.STREAMING) and seat_epoch != receiver_epoch:
                yield (self.again, request, Event.RESTART)
            if state == State.PREFILLING and asked != owner_epoch:
                yield (self.again, request, Event.AGAIN)

    def owner_acts(self, world: State_) -> Iterator[tuple]:
        for nonce, state in world[1]:
            if state == State.OFFERED:
                yield (self.seal if world[2][1] == 2 else self.compute, nonce)
            yield (self.expire_ticket, nonce)
        if world[-1][2]:
            yield (self.crash_owner,)

    def receiver_acts(self, world: State_) -> Iterator[tuple]:
        for name, state, _, _, receiver in world[3]:
            yield (self.expire_seat, name)
            if receiver in UNSEALED:
                yield (self.pull_given_up, name)
            if state == State.TAKEN:
                yield (self.orphan, name)
                if receiver == State.FETCHING:
                    yield (self.give_up, name)
                if receiver == State.RELEASED:
                    yield (self.finish, name)
        for cell, _, landed, posted in world[5]:
            if landed < posted:
                yield (self.land, cell)
        if world[-1][2]:
            yield (self.crash_receiver,)

    def network_acts(self, world: State_) -> Iterator[tuple]:
        messages, left = world[6], world[-1]
        for message in self.deliverable(messages):
            for branch in BRANCHES.get(message[0], ("",)):
                yield (self.deliver, message, branch)
        for message in dict.fromkeys(messages):
            if left[0]:
                yield (self.lose, message)
            if left[1]:
                yield (self.repeat, message)

    def deliverable(self, messages) -> list:
        """Any message; when channels keep their order, the oldest of each channel and request."""
        if not self.faults.ordered:
            return list(dict.fromkeys(messages))
        firsts = {}
        for message in messages:
            kind, name, nonce, *_ = message
            request = name >> 1 if nonce == NOBODY else nonce >> 2
            firsts.setdefault((CHANNEL[kind], request), message)
        return list(firsts.values())

    def deliver(self, draft: Draft, message, branch: str) -> None:
        draft.messages.remove(message)
        kind, *fields = message
        handler = getattr(self, f"on_{kind.replace(' ', '_')}")
        handler(draft, *fields, branch) if branch else handler(draft, *fields)

    def lose(self, draft: Draft, message) -> None:
        draft.left[0] -= 1
        draft.messages.remove(message)

    def repeat(self, draft: Draft, message) -> None:
        draft.left[1] -= 1
        draft.messages.append(message)

    def step(self, table: str, state: State, event: Event) -> State | None:
        """One row of a table, noted."""
        after = step(getattr(self.rules, table), state, event)
        if after is not None:
            self.rows[table, state, event] += 1
        return after

    def move(self, table: str, state: State, event: Event, *, due: bool = False) -> State | None:
        """The same for a record under a lease, which ends at 1 on a clock that shows 0 or 1."""
        record = Leased(state=state, until=1.0)
        after = move(getattr(self.rules, table), record, event, float(due), 1.0)
        if after is None:
            return None
        self.rows[table, state, Event.EXPIRE if due else event] += 1
        return after.state

    # --- the router ---------------------------------------------------------------------------

    def ask(self, draft: Draft, request: int) -> None:
        router = draft.routers[request]
        router[2] = 2 * request + router[1]
        draft.messages.append(("reserve", router[2], NOBODY))

    def turn(self, draft: Draft, request: int, event: Event) -> bool:
        """Move a router's record; false when the event means nothing now."""
        router = draft.routers[request]
        after = self.step("router", router[0], event)
        if after is None:
            return False
        router[0] = after
        router[6] += after in FINAL
        return True

    def quit(self, draft: Draft, request: int) -> None:
        """The client leaves, or the deadline passes, or the router gives up."""
        state, k, seat, *_ = draft.routers[request]
        if not self.turn(draft, request, Event.QUIT) or not self.habits.router_cancels:
            return
        if seat != NOBODY:
            draft.messages.append(("cancel seat", seat, NOBODY))
        if state in (State.PREFILLING, State.HANDING):
            draft.messages.append(("cancel", 2 * request + k, NOBODY))

    def again(self, draft: Draft, request: int, event: Event) -> None:
        """Another pass, if one is left."""
        router = draft.routers[request]
        if router[1] == 1 and self.habits.router_counts:
            return self.quit(draft, request)
        if not self.turn(draft, request, event):
            return None
        router[1] += 1
        if event is Event.RESTART:
            router[2], router[5] = NOBODY, NOBODY
        else:
            router[4] = draft.epochs[0]
            draft.messages.append(("prefill", 2 * request + router[1], NOBODY))
        return None

    def on_granted(self, draft: Draft, name: int, _: int, epoch: int) -> None:
        router = draft.routers[name >> 1]
        if router[2] == name and self.turn(draft, name >> 1, Event.GRANT):
            router[3], router[4] = epoch, draft.epochs[0]
            draft.messages.append(("prefill", 2 * (name >> 1) + router[1], NOBODY))

    def on_offered(self, draft: Draft, name: int, nonce: int, made: int) -> None:
        router = draft.routers[name >> 1]
        if router[0] == State.PREFILLING and router[1] == name & 1:
            draft.messages.append(("pull", router[2], nonce, made, draft.epochs[0], router[3]))

    def on_ticket(self, draft: Draft, name: int, nonce: int, epoch: int, branch: str) -> None:
        router = draft.routers[name >> 1]
        event = Event.TICKET if branch == "hand" else Event.FINISH
        if (
            router[0] != State.PREFILLING
            or router[1] != name & 1
            or not self.turn(draft, name >> 1, event)
        ):
            return
        router[5] = nonce
        if event is Event.TICKET:
            draft.messages.append(("decode", router[2], nonce, epoch, draft.epochs[0], router[3]))
        else:
            draft.messages.append(("release", NOBODY, nonce, Event.RELEASE))
            draft.messages.append(("release seat", router[2], NOBODY))

    def on_failed(self, draft: Draft, name: int, _: int) -> None:
        router = draft.routers[name >> 1]
        if router[0] == State.PREFILLING and router[1] == name & 1:
            self.again(draft, name >> 1, Event.AGAIN)

    def on_accepted(self, draft: Draft, seat: int, nonce: int) -> None:
        if draft.routers[seat >> 1][2] == seat and draft.routers[seat >> 1][5] == nonce:
            self.turn(draft, seat >> 1, Event.ACCEPT)

    def on_refused(self, draft: Draft, seat: int, nonce: int) -> None:
        state, _, at, _, _, wanted, _ = draft.routers[seat >> 1]
        if state == State.HANDING and (at, wanted) == (seat, nonce):
            self.again(draft, seat >> 1, Event.AGAIN)

    def on_gone(self, draft: Draft, seat: int, nonce: int) -> None:
        state, _, at, _, _, wanted, _ = draft.routers[seat >> 1]
        if state == State.HANDING and (at, wanted) == (seat, nonce):
            self.quit(draft, seat >> 1)
        elif state == State.PREFILLING and at == seat:
            self.again(draft, seat >> 1, Event.RESTART)

    def on_finish(self, draft: Draft, seat: int, nonce: int) -> None:
        state, _, at, _, _, wanted, _ = draft.routers[seat >> 1]
        if (at, wanted) == (seat, nonce):
            if state == State.HANDING:
                raise Later  # frames follow the acceptance on one connection
            self.turn(draft, seat >> 1, Event.FINISH)

    # --- P, the owner -------------------------------------------------------------------------

    def on_prefill(self, draft: Draft, name: int, _: int) -> None:
        if any(nonce >> 1 == name for nonce in draft.tickets):
            return  # repeated
        if draft.place[0] != NOBODY:
            raise Later
        nonce = 2 * name + (draft.marks[2] >> 2 * name & 1)
        if not draft.marks[2] >> nonce & 1:
            draft.marks[2] |= 1 << nonce
            draft.tickets[nonce] = State.OFFERED
            if self.early:
                draft.place[:] = [nonce, 1, nonce, draft.place[3]]
                draft.messages.append(("offered", name, nonce, draft.epochs[0]))
            else:
                draft.place[:] = [nonce, 2, nonce, nonce]

    def compute(self, draft: Draft, nonce: int) -> None:
        """The second half becomes final."""
        draft.place[:] = [nonce, 2, nonce, nonce]

    def seal(self, draft: Draft, nonce: int) -> None:
        renewed = self.move("owner", draft.tickets[nonce], Event.RENEW)
        sealed = self.move("owner", renewed, Event.SEAL) if renewed else None
        if sealed is None:
            raise Later
        draft.tickets[nonce] = sealed
        draft.marks[4] |= 1 << nonce
        draft.messages.append(("ticket", nonce >> 1, nonce, draft.epochs[0]))

    def end_ticket(self, draft: Draft, nonce: int, event: Event, *, due: bool = False) -> bool:
        """Move a ticket and free its place when it ended."""
        state = draft.tickets.get(nonce)
        after = None if state is None else self.move("owner", state, event, due=due)
        if after in ENDED:
            del draft.tickets[nonce]
        if after in ENDED or not self.habits.owner_looks:
            draft.place[:2] = [NOBODY, 0]
        elif after is not None:
            draft.tickets[nonce] = after
        return after in ENDED

    def expire_ticket(self, draft: Draft, nonce: int) -> None:
        """The lease runs out: at once when nobody renews it, else as a fault."""
        state = draft.tickets[nonce]
        renewed = state == State.OFFERED
        renewed |= any(r[0] == State.HANDING and r[5] == nonce for r in draft.routers)
        renewed |= any(
            seat[2] == nonce and seat[3] in (*UNSEALED, State.SEALED, State.FETCHING)
            for seat in draft.seats.values()
        )
        renewed |= any(message[2] == nonce for message in draft.messages)
        self.spend(draft, renewed)
        if not self.end_ticket(draft, nonce, Event.EXPIRE, due=True):
            raise Later
        if state == State.OFFERED:
            draft.messages.append(("failed", nonce >> 1, NOBODY))

    def spend(self, draft: Draft, fault: bool) -> None:
        """Let a lease run out, which is a fault while somebody renews it."""
        if fault:
            if not draft.left[3]:
                raise Later
            draft.left[3] -= 1
        elif not self.faults.leases:
            raise Later

    def on_claim(self, draft: Draft, _: int, nonce: int) -> None:
        state = draft.tickets.get(nonce)
        granted = state is not None and self.move("owner", state, Event.RENEW) is not None
        draft.messages.append(("claimed", NOBODY, nonce, int(granted)))

    def on_await(self, draft: Draft, _: int, nonce: int, known: int) -> None:
        """Answered when more than `known` halves are final, or when the ticket ended."""
        state = draft.tickets.get(nonce)
        if state is None or self.move("owner", state, Event.RENEW) is None:
            draft.messages.append(("ready", NOBODY, nonce, 0))
            return
        final = draft.place[1] if self.habits.owner_waits else 2
        if final <= known:
            raise Later
        draft.messages.append(("ready", NOBODY, nonce, final))

    def on_release(self, draft: Draft, _: int, nonce: int, event: Event) -> None:
        was = draft.tickets.get(nonce)
        ended = self.end_ticket(draft, nonce, event)
        if ended and was == State.OFFERED:
            draft.messages.append(("failed", nonce >> 1, NOBODY))

    def on_cancel(self, draft: Draft, name: int, _: int) -> None:
        for nonce in [nonce for nonce in draft.tickets if nonce >> 1 == name]:
            if not self.end_ticket(draft, nonce, Event.ABORT):
                raise Broken(f"ticket {nonce} outlives its cancel")

    def crash_owner(self, draft: Draft) -> None:
        draft.left[2] -= 1
        draft.epochs[0] += 1
        draft.marks[3] = draft.marks[2]
        draft.tickets.clear()
        draft.place[:] = [NOBODY, 0, NOBODY, NOBODY]
        for cell in list(draft.reads):
            self.read_ends(draft, cell, Event.FAIL)

    # --- D, the receiver ----------------------------------------------------------------------

    def on_reserve(self, draft: Draft, name: int, _: int) -> None:
        if name not in draft.seats:
            cell = self.free_cell(draft)
            draft.cells[cell] = [State.HELD, name, NOBODY, NOBODY]
            draft.seats[name] = [State.GRANTED, cell, NOBODY, ""]
        draft.messages.append(("granted", name, NOBODY, draft.epochs[1]))

    @staticmethod
    def free_cell(draft: Draft) -> int:
        for at, cell in enumerate(draft.cells):
            if cell[0] == State.FREE:
                return at
        raise Later

    def on_decode(
        self, draft: Draft, name: int, nonce: int, made: int, peer: int, granted: int
    ) -> None:
        seat = draft.seats.get(name)
        if seat is not None and seat[2] == nonce and seat[0] == State.TAKEN:
            return  # repeated
        if not self.habits.receiver_reserves and seat is None:
            cell = self.free_cell(draft)
            draft.cells[cell] = [State.HELD, name, NOBODY, NOBODY]
            seat = draft.seats[name] = [State.GRANTED, cell, NOBODY, ""]
        elif seat is None or granted != draft.epochs[1]:
            self.turn_away(draft, name, nonce, tell=True)
            return
        if seat[3] in UNSEALED and seat[2] == nonce and self.habits.receiver_joins:
            self.join(draft, name)
            return
        if seat[3] in UNSEALED and seat[2] != nonce and not self.make_way(draft, name):
            self.turn_away(draft, name, nonce, tell=True)
            return
        used = bool(draft.marks[0] >> nonce & 1) and self.habits.receiver_remembers
        refused = self.rules.objection(
            ticket_epoch=made, producer_epoch=peer, known_epoch=draft.epochs[2], is_used=used
        )
        draft.epochs[2] = max(draft.epochs[2], peer)
        taken = None if refused else self.move("reservation", seat[0], Event.TAKE)
        if taken is None:  # a ticket taken before, or of a dead process, is not this job's to end
            self.turn_away(draft, name, nonce, tell=not refused)
            return
        if made < draft.epochs[2]:
            raise Broken(f"ticket {nonce} of an older epoch is accepted")
        if draft.marks[1] >> nonce & 1:
            raise Broken(f"ticket {nonce} is taken twice")
        draft.marks[0] |= 1 << nonce
        draft.marks[1] |= 1 << nonce
        draft.seats[name] = [taken, seat[1], nonce, State.SEALED]
        draft.messages.append(("claim", NOBODY, nonce))

    def on_claimed(self, draft: Draft, _: int, nonce: int, granted: int, branch: str = "") -> None:
        name = next(
            (n for n, s in draft.seats.items() if s[2] == nonce and s[3] == State.SEALED), None
        )
        if branch:  # so late that too little of the lease is left
            self.spend(draft, True)
        if name is None:
            return
        if branch or not granted:
            return self.refuse(draft, name, Event.EXPIRE if branch else Event.REFUSE)
        seat, cell = draft.seats[name], draft.cells[draft.seats[name][1]]
        seat[3] = self.step("receiver", seat[3], Event.POST)
        cell[0] = self.step("destination", cell[0], Event.POST)
        self.post(draft, seat[1], nonce, 2)
        return None

    def post(self, draft: Draft, at: int, nonce: int, halves: int) -> None:
        draft.reads[at] = (nonce, 0, halves)
        if draft.marks[3] >> nonce & 1:  # the process that made it is gone
            self.read_ends(draft, at, Event.FAIL)

    def on_pull(
        self, draft: Draft, name: int, nonce: int, made: int, peer: int, granted: int
    ) -> None:
        """Begin to READ an offer; one that is turned away is handed off whole, or not at all."""
        seat = draft.seats.get(name)
        if seat is None or granted != draft.epochs[1] or seat[0] != State.GRANTED:
            return
        if seat[2] == nonce or (seat[3] in UNSEALED and not self.make_way(draft, name)):
            return
        used = bool(draft.marks[0] >> nonce & 1) and self.habits.receiver_remembers
        refused = self.rules.objection(
            ticket_epoch=made, producer_epoch=peer, known_epoch=draft.epochs[2], is_used=used
        )
        draft.epochs[2] = max(draft.epochs[2], peer)
        if refused:
            return
        if made < draft.epochs[2]:
            raise Broken(f"an offer {nonce} of an older epoch is pulled")
        if draft.marks[1] >> nonce & 1:
            raise Broken(f"ticket {nonce} is taken twice")
        draft.marks[0] |= 1 << nonce
        draft.marks[1] |= 1 << nonce
        seat[2:] = [nonce, State.OFFERED]
        draft.messages.append(("await", NOBODY, nonce, 0))

    def on_ready(self, draft: Draft, _: int, nonce: int, final: int, branch: str = "") -> None:
        """So many halves may be READ; 0: the owner holds the ticket no more."""
        known = (*UNSEALED, State.SEALED, State.FETCHING)
        name = next((n for n, s in draft.seats.items() if s[2] == nonce and s[3] in known), None)
        if branch:
            self.spend(draft, True)
        if name is None:
            if not self.habits.receiver_stops:
                self.pull_on(draft, nonce, final)
            return
        seat, at = draft.seats[name], draft.seats[name][1]
        if at not in draft.reads and seat[3] in (State.PULLING, State.FETCHING):
            return  # everything is here
        if branch or not final:
            if at in draft.reads and draft.reads[at][1] < draft.reads[at][2]:
                raise Later  # what was posted ends first
            self.end_pull(draft, name, Event.EXPIRE if branch else Event.REFUSE)
        elif seat[3] in (State.OFFERED, State.SEALED):
            seat[3] = self.step("receiver", seat[3], Event.POST)
            draft.cells[at][0] = self.step("destination", draft.cells[at][0], Event.POST)
            self.post(draft, at, nonce, final)
            if final < 2 and at in draft.reads:
                draft.messages.append(("await", NOBODY, nonce, final))
        elif final > draft.reads[at][2]:
            draft.reads[at] = (*draft.reads[at][:2], final)

    def pull_on(self, draft: Draft, nonce: int, final: int) -> None:
        """What a receiver must not do: post more for a request that is gone."""
        for at, (reading, landed, posted) in draft.reads.items():
            if reading == nonce and posted < final:
                draft.reads[at] = (nonce, landed, final)
                raise Broken(f"the pull of {nonce} outlives its reservation")

    def join(self, draft: Draft, name: int) -> None:
        """The job came with the seal of what is being pulled: it goes on as its READ."""
        seat = draft.seats[name]
        seat[0] = self.move("reservation", seat[0], Event.TAKE)
        seat[3] = self.step("receiver", seat[3], Event.SEAL)
        if seat[3] == State.FETCHING and seat[1] not in draft.reads:
            self.compare(draft, name, Event.DONE)

    def rest(self, draft: Draft, at: int) -> bool:
        """Let go of a READ of which nothing is in flight; False while something is."""
        if at in draft.reads:
            _, landed, posted = draft.reads[at]
            if landed < posted:
                return False
            del draft.reads[at]
            draft.cells[at][0] = self.step("destination", draft.cells[at][0], Event.FAIL)
        return True

    def make_way(self, draft: Draft, name: int) -> bool:
        """Another ticket comes for a seat that pulls: that one ends unless it is in mid-READ."""
        _, landed, posted = draft.reads.get(draft.seats[name][1], (0, 0, 0))
        if landed == posted:
            self.end_pull(draft, name, Event.ABORT)
        return landed == posted

    def end_pull(self, draft: Draft, name: int, event: Event) -> None:
        """A pull comes to nothing while nothing of it is in flight; its reservation stands."""
        seat = draft.seats[name]
        self.rest(draft, seat[1])
        if seat[0] == State.TAKEN:
            return self.refuse(draft, name, event)
        self.step("receiver", seat[3], event)
        event = Event.ABORT if event in (Event.ABORT, Event.FAIL) else Event.REFUSE
        self.tell(draft, seat[2], event)
        seat[2:] = [NOBODY, ""]
        draft.cells[seat[1]][2:] = [NOBODY, NOBODY]
        return None

    def pull_given_up(self, draft: Draft, name: int) -> None:
        """No word came about its halves, or a READ takes too long, which spends the seat."""
        _, at, nonce, receiver = draft.seats[name]
        if receiver == State.PULLING and at not in draft.reads:
            raise Later  # everything is here
        if at not in draft.reads or draft.reads[at][1] == draft.reads[at][2]:
            return self.end_pull(draft, name, Event.ABORT)
        self.leave(draft, name, Event.ABORT)
        draft.messages.append(("gone", name, nonce))
        return None

    def land(self, draft: Draft, at: int) -> None:
        """Half of a READ arrives, whatever P's place holds by now."""
        nonce, landed, posted = draft.reads[at]
        if draft.place[0] == nonce and landed >= draft.place[1]:
            raise Broken(f"a half of {nonce} is READ that is still being written")
        draft.cells[at][2 + landed] = draft.place[2 + landed]
        draft.reads[at] = (nonce, landed + 1, posted)
        if landed or (landed + 1 == posted and draft.cells[at][0] == State.QUARANTINE):
            self.read_ends(draft, at, Event.DONE)

    def read_ends(self, draft: Draft, at: int, event: Event) -> None:
        draft.reads.pop(at)
        cell = draft.cells[at]
        abandoned = cell[0] != State.FETCHING
        after = self.step("destination", cell[0], event)
        if after is not None:
            cell[0] = after
        if after == State.FREE:
            cell[1:] = [NOBODY] * 3
        if abandoned:
            return
        name = next(name for name, seat in draft.seats.items() if seat[1] == at)
        seat = draft.seats[name]
        if seat[3] != State.PULLING:
            self.compare(draft, name, event)
        elif event is Event.FAIL:
            self.end_pull(draft, name, event)
        elif not self.habits.receiver_seals:
            seat[0] = self.move("reservation", seat[0], Event.TAKE)
            seat[3] = State.RELEASED

    def compare(self, draft: Draft, name: int, event: Event) -> None:
        """A READ is over: what arrived against the seal."""
        cell, nonce = draft.cells[draft.seats[name][1]], draft.seats[name][2]
        matches = cell[2:] == [nonce, nonce] or not self.habits.receiver_compares
        if event is Event.FAIL or not matches:
            self.refuse(draft, name, Event.FAIL if event is Event.FAIL else Event.REFUSE)
            return
        seat = draft.seats[name]
        seat[3] = self.step("receiver", seat[3], Event.MATCH)
        seat[3] = self.step("receiver", seat[3], Event.RELEASE)
        self.tell(draft, nonce, Event.RELEASE)
        draft.messages.append(("accepted", name, nonce))

    def refuse(self, draft: Draft, name: int, event: Event) -> None:
        """The ticket is no good; the reservation stands."""
        seat = draft.seats[name]
        ended = self.step("receiver", seat[3], event)
        if ended == State.VERIFIED:
            seat[3] = self.step("receiver", ended, Event.RELEASE)
            return
        self.tell(draft, seat[2], Event.ABORT if event is Event.FAIL else Event.REFUSE)
        draft.messages.append(("refused", name, seat[2]))
        seat[0] = self.move("reservation", seat[0], Event.REFUSE)
        seat[2:] = [NOBODY, ""]
        draft.cells[seat[1]][2:] = [NOBODY, NOBODY]

    def turn_away(self, draft: Draft, name: int, nonce: int, *, tell: bool) -> None:
        """Refuse a job whose ticket was not taken."""
        draft.messages.append(("refused", name, nonce))
        if tell:
            self.tell(draft, nonce, Event.REFUSE)

    def tell(self, draft: Draft, nonce: int, event: Event) -> None:
        if self.habits.receiver_tells:
            draft.messages.append(("release", NOBODY, nonce, event))

    def leave(self, draft: Draft, name: int, event: Event, *, due: bool = False) -> None:
        """End a seat: its READ goes on in quarantine, anything else is free at once."""
        state, at, nonce, receiver = draft.seats[name]
        if self.move("reservation", state, event, due=due) not in ENDED:
            raise Later
        del draft.seats[name]
        if receiver in (*UNSEALED, State.SEALED, State.FETCHING):
            self.step("receiver", receiver, Event.ABORT)
            self.tell(draft, nonce, Event.ABORT)
        cell = draft.cells[at]
        is_reading = at in draft.reads and not (self.habits.receiver_rests and self.rest(draft, at))
        cell[0] = self.step("destination", cell[0], Event.ABANDON if is_reading else Event.GIVE)
        cell[1] = NOBODY
        if cell[0] == State.FREE:
            cell[2:] = [NOBODY, NOBODY]

    def finish(self, draft: Draft, name: int) -> None:
        nonce = draft.seats[name][2]
        self.leave(draft, name, Event.RELEASE)
        draft.messages.append(("finish", name, nonce))

    def give_up(self, draft: Draft, name: int) -> None:
        """D's own deadline for the READ passes."""
        nonce = draft.seats[name][2]
        self.leave(draft, name, Event.ABORT)
        draft.messages.append(("gone", name, nonce))

    def follows(self, draft: Draft, name: int) -> bool:
        router = draft.routers[name >> 1]
        return router[2] == name and router[0] not in FINAL

    def orphan(self, draft: Draft, name: int) -> None:
        """The router's connection closed, or it follows this seat no more."""
        if self.follows(draft, name) or not self.faults.leases:
            raise Later
        self.leave(draft, name, Event.ABORT)

    def expire_seat(self, draft: Draft, name: int) -> None:
        renewed = self.follows(draft, name) or any(message[1] == name for message in draft.messages)
        if renewed and not draft.left[3] and draft.seats[name][0] == State.GRANTED:
            draft.seats[name][0] = self.move("reservation", State.GRANTED, Event.RENEW)
            return
        self.spend(draft, renewed)
        self.leave(draft, name, Event.EXPIRE, due=True)

    def on_release_seat(self, draft: Draft, name: int, _: int) -> None:
        if name in draft.seats:
            self.leave(draft, name, Event.RELEASE)

    def on_cancel_seat(self, draft: Draft, name: int, _: int) -> None:
        if name in draft.seats:
            try:
                self.leave(draft, name, Event.ABORT)
            except Later:
                raise Broken(f"seat {name} outlives its cancel") from None

    def crash_receiver(self, draft: Draft) -> None:
        draft.left[2] -= 1
        draft.epochs[1] += 1
        draft.epochs[2], draft.marks[0] = 0, 0
        draft.seats.clear()
        draft.reads.clear()
        draft.cells[:] = [[State.FREE, NOBODY, NOBODY, NOBODY] for _ in draft.cells]


MOMENTS = (
    lambda world: True,
    lambda world: world[5] and len(world[3]) == 2,  # a READ, while the other waits for its turn
    lambda world: world[5] and world[5][0][2] == 1 and not world[1],  # half a READ of a freed place
    lambda world: any(router[0] == State.STREAMING for router in world[0]) and len(world[3]) == 2,
    lambda world: any(cell[0] == State.QUARANTINE for cell in world[4]),
    lambda world: any(message[0] == "decode" for message in world[6]) and len(world[3]) == 2,
    lambda world: any(message[0] == "decode" for message in world[6]),
)


def _hold(claim: bool, sentence: str, label: str, world: State_) -> None:
    if not claim:
        raise Broken(f"{sentence}, after {label}: {world}")
