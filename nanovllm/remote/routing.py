"""Chooses the replica for each request: pure logic, no I/O.

A replica that has computed a prompt's prefix before finds it in its prefix cache, so requests with the same prefix
should go to the same replica; but not all of them, or one replica works while the others are idle. `Router` weighs the
two:

  1. The prompt is cut into blocks, and each block is named by a hash of itself, all blocks before it and the salt
     (blocks with different salts are never shared). For each name the router remembers which replicas were sent it.
  2. Of the replicas that hold the longest prefix, the least loaded one gets the request, unless it is too busy. Then
     the replicas that hold the next shorter prefix are considered, and so on.
  3. If no replica holds any prefix, or all that do are too busy, the least loaded of all replicas gets the request and
     holds its blocks from then on. Ties go to the replica with fewest known blocks, then to the one added first.

How much more load than the least loaded replica a holder may have depends on how much it saves. If it holds the whole
prompt: `max_lead`, or the factor `max_ratio` if that allows more; if it holds half of it: half as much; and so on. Both
bounds are needed: `max_lead` means little under heavy load, `max_ratio` means little under light load. And a prefix
that all prompts share, such as a system prompt before long documents, must not draw all requests to one replica.

The router does not know what a replica's cache holds, only what it was sent; of that it remembers the most recently
used `blocks_per_replica` blocks. A wrong guess costs time but never changes an answer.

Load is the sum of the requests' `weight`: 1 each, unless the caller passes something better, such as tokens.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence

Replica = Hashable

MAX_LEAD, MAX_RATIO = 8, 1.5  # requests, factor; docs/simulate.md shows their effect


class Policy(ABC):
    """Counts the load of each replica; subclasses choose one."""

    def __init__(self, replicas: Iterable[Replica] = ()) -> None:
        self._loads: dict[Replica, int] = {}  # in the order of `add`
        for replica in replicas:
            self.add(replica)

    @property
    def loads(self) -> dict[Replica, int]:
        """The sum of the weights of the requests that run on each replica."""
        return dict(self._loads)

    def add(self, replica: Replica) -> None:
        if replica in self._loads:
            raise ValueError(f"replica {replica!r} is already here")
        self._loads[replica] = 0

    def remove(self, replica: Replica) -> None:
        """Never choose this replica again, and forget what it holds. An unknown replica is ignored."""
        self._loads.pop(replica, None)

    def route(self, token_ids: Sequence[int], *, salt: str | None = None, weight: int = 1) -> Replica:
        """Choose the replica for this prompt; the request counts as its load until `finished`."""
        if not self._loads:
            raise LookupError("there is no replica to send a request to")
        replica = self._choose(token_ids, salt)
        self._loads[replica] += weight
        return replica

    def finished(self, replica: Replica, *, weight: int = 1) -> None:
        """A routed request has ended, successfully or not. A replica that was removed since is ignored."""
        if replica in self._loads:
            # not below 0: the replica may have been removed and added again
            self._loads[replica] = max(0, self._loads[replica] - weight)

    @abstractmethod
    def _choose(self, token_ids: Sequence[int], salt: str | None) -> Replica: ...


class RoundRobin(Policy):
    """Chooses the replicas in turn, in the order of `add`."""

    def __init__(self, replicas: Iterable[Replica] = ()) -> None:
        super().__init__(replicas)
        self._next = 0

    def _choose(self, token_ids: Sequence[int], salt: str | None) -> Replica:
        self._next %= len(self._loads)
        replica = list(self._loads)[self._next]
        self._next += 1
        return replica


class LeastLoaded(Policy):
    """Chooses the replica with the smallest load; of several, the one that was chosen longest ago."""

    def __init__(self, replicas: Iterable[Replica] = ()) -> None:
        self._chosen_at: dict[Replica, int] = {}
        self._clock = 0
        super().__init__(replicas)

    def add(self, replica: Replica) -> None:
        super().add(replica)
        self._chosen_at[replica] = 0

    def remove(self, replica: Replica) -> None:
        super().remove(replica)
        self._chosen_at.pop(replica, None)

    def _choose(self, token_ids: Sequence[int], salt: str | None) -> Replica:
        least = min(self._loads.values())
        equals = [replica for replica, load in self._loads.items() if load == least]
        replica = min(equals, key=self._chosen_at.__getitem__)
        self._clock += 1
        self._chosen_at[replica] = self._clock
        return replica


class Router(Policy):
    """Chooses the replica that holds the longest prefix, unless it is much busier than the least loaded one."""

    def __init__(
        self,
        replicas: Iterable[Replica] = (),
        *,
        block_size: int = 32,
        blocks_per_replica: int = 1 << 15,
        max_lead: int = MAX_LEAD,
        max_ratio: float = MAX_RATIO,
    ) -> None:
        if block_size < 1 or blocks_per_replica < 1:
            raise ValueError(f"{block_size=} and {blocks_per_replica=} must be at least 1")
        if not max_lead >= 0 or not max_ratio >= 1:
            raise ValueError(f"{max_lead=} must be at least 0, {max_ratio=} at least 1")
        self.block_size = block_size
        self.blocks_per_replica = blocks_per_replica
        self.max_lead = max_lead
        self.max_ratio = max_ratio
        self._known: dict[Replica, OrderedDict[int, None]] = {}  # names of blocks sent, least recently used first
        self._bit: dict[Replica, int] = {}  # the bit that stands for it in `_holders`
        self._by_bit: dict[int, Replica] = {}
        self._holders: dict[int, int] = {}  # block name -> set of the replicas that were sent it, one bit each
        super().__init__(replicas)

    def add(self, replica: Replica) -> None:
        super().add(replica)
        bit = _lowest_free_bit(self._by_bit)
        self._bit[replica] = bit
        self._by_bit[bit] = replica
        self._known[replica] = OrderedDict()

    def remove(self, replica: Replica) -> None:
        super().remove(replica)
        if replica in self._bit:
            for name in self._known.pop(replica):
                self._forget(name, self._bit[replica])
            del self._by_bit[self._bit.pop(replica)]

    def num_known_blocks(self, replica: Replica) -> int:
        return len(self._known[replica])

    def _choose(self, token_ids: Sequence[int], salt: str | None) -> Replica:
        names = self._names(token_ids, salt)
        replica = self._best_holder(names)
        self._remember(replica, names)
        return replica

    def _best_holder(self, names: list[int]) -> Replica:
        least = min(self._loads.values())
        most_lead = max(self.max_lead, (self.max_ratio - 1) * least)
        for num_blocks, holders in reversed(self._holders_along(names)):
            best = self._least_loaded(self._replicas_of(holders))
            if self._loads[best] - least <= most_lead * num_blocks / len(names):
                return best
        return self._least_loaded(self._loads)

    def _holders_along(self, names: list[int]) -> list[tuple[int, int]]:
        """For growing prefixes the number of blocks and the set of replicas that hold them; one entry per set."""
        found: list[tuple[int, int]] = []
        holders = -1  # all bits: every replica holds the empty prefix
        for index, name in enumerate(names):
            fewer = holders & self._holders.get(name, 0)
            if fewer != holders and index:
                found.append((index, holders))
            if not fewer:
                return found
            holders = fewer
        return [*found, (len(names), holders)] if names else []

    def _least_loaded(self, replicas: Iterable[Replica]) -> Replica:
        return min(replicas, key=lambda replica: (self._loads[replica], len(self._known[replica])))

    def _replicas_of(self, holders: int) -> Iterator[Replica]:
        """The replicas of a set in the order of their bits: the order of `add`, unless one was removed."""
        while holders:
            bit = holders & -holders
            yield self._by_bit[bit]
            holders ^= bit

    def _names(self, token_ids: Sequence[int], salt: str | None) -> list[int]:
        size = self.block_size
        names = [hash(salt)]
        for end in range(size, len(token_ids) + 1, size):
            names.append(hash((names[-1], *token_ids[end - size : end])))
        return names[1:]

    def _remember(self, replica: Replica, names: list[int]) -> None:
        """Mark the blocks as used, the first block of the prompt last: without it the others cannot be found."""
        known, bit = self._known[replica], self._bit[replica]
        for name in reversed(names):
            if name in known:
                known.move_to_end(name)
            else:
                known[name] = None
                self._holders[name] = self._holders.get(name, 0) | bit
        while len(known) > self.blocks_per_replica:
            name, _ = known.popitem(last=False)
            self._forget(name, bit)

    def _forget(self, name: int, bit: int) -> None:
        holders = self._holders[name] & ~bit
        if holders:
            self._holders[name] = holders
        else:
            del self._holders[name]


def _lowest_free_bit(taken: Iterable[int]) -> int:
    used = sum(taken)
    return ~used & (used + 1)
