"""Sequential tree-reweighted message passing, TRW-S (Kolmogorov, PAMI 28(10), 2006), in numpy, with its lower bound.

Every edge e = (u, v) has a message into each end, kept per class: m_{e->u}, m_{e->v}. They reparametrise the problem:

    beta_u(i)   = costs_u(i) + sum_{e at u} m_{e->u}(i)
    C'_e(a, b)  = C_e(a, b) - m_{e->u}(a) - m_{e->v}(b)            (the total cost of every choice is unchanged)

A sweep visits the nodes in order (then in reverse). At s, with gamma = 1 / max(edges ahead, edges behind),
delta_s = min beta_s, and for every edge e = (s, t) ahead

    m(b) = min_a [ min_{i in a} (gamma (beta_s(i) - delta_s) - m_{e->s}(i)) + C_e(a, b) ];  delta_e = min_b m(b);
    m_{e->t} = m - delta_e.

Lower bound of the sweep: sum_s delta_s + sum_e delta_e. It holds for any messages: beta_s - delta_s >= 0 is handed out
in shares of gamma to at most 1 / gamma edges, and gamma (beta_s - delta_s)(i) + C'_e(i, b) >= delta_e by construction.

So messages may also run ahead, m + (k - 1) / (k + 2) (m - m of the step before) at step k since the bound last fell
(Nesterov, Soviet Mathematics Doklady 27, 1983; restarts: O'Donoghue and Candes, Foundations of Computational
Mathematics 15, 2015): bounds that sweeps alone raise to in hundreds of passes take tens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.eliminate import class_min
from autopar.solver.problem import Edge, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Port:
    """An edge as one of its nodes sees it.

    `row`: the row of the node's message index; `order`, `starts`: sort its choices by class, where the classes begin
    (None: each choice is its own class, in order); `out`: where the message to the other node is kept.
    """

    edge: int
    other: int
    row: int
    classes: IntArray
    order: IntArray | None
    starts: IntArray | None
    out: slice
    along_rows: bool
    other_class: IntArray


class Messages:
    """The messages of one graph (the core). They survive changes of the costs, so each price starts from the last."""

    def __init__(self, nodes: Sequence[int], edges: Sequence[Edge]) -> None:
        self.nodes = list(nodes)
        self.position = {v: p for p, v in enumerate(self.nodes)}
        self.values = np.zeros(sum(sum(e.costs.shape) for e in edges))
        self.costs: list[FloatArray] = []
        self.matrices: list[FloatArray] = []
        self._connect(edges)
        self.restart()

    def _connect(self, edges: Sequence[Edge]) -> None:
        """The ports of all nodes, and where in `values` what comes in is kept."""
        position = self.position
        self.ahead: list[list[Port]] = [[] for _ in self.nodes]
        self.behind: list[list[Port]] = [[] for _ in self.nodes]
        rows: list[list[IntArray]] = [[] for _ in self.nodes]
        size = 0
        for index, e in enumerate(edges):
            into_u = slice(size, size + e.costs.shape[0])
            into_v = slice(into_u.stop, into_u.stop + e.costs.shape[1])
            size = into_v.stop
            u, v = position[e.u], position[e.v]
            for mine, other, my_class, other_class, inward, outward, along in (
                (u, v, e.u_class, e.v_class, into_u, into_v, True),
                (v, u, e.v_class, e.u_class, into_v, into_u, False),
            ):
                order, starts = _grouping(my_class)
                port = Port(index, other, len(rows[mine]), my_class, order, starts, outward, along, other_class)
                (self.ahead if other > mine else self.behind)[mine].append(port)
                rows[mine].append(my_class + inward.start)
        self.inward = [np.array(r) if r else None for r in rows]
        self.share = [1.0 / max(len(a), len(b), 1) for a, b in zip(self.ahead, self.behind, strict=True)]

    def set_costs(self, costs: Sequence[FloatArray], edges: Sequence[Edge]) -> None:
        """Node costs (by graph node) and edge matrices from here on."""
        self.costs = [costs[v] for v in self.nodes]
        self.matrices = [e.costs for e in edges]
        self.restart()

    def restart(self) -> None:
        """The next step is the first: the bounds before it were of other costs."""
        self._steps, self._bound, self._best_bound = 0, -np.inf, -np.inf
        self._before = self._best = self.values.copy()

    def keep_going(self) -> None:
        """Where costs have changed a little: messages go on as they were moving, though their bounds begin anew."""
        self._bound, self._best_bound = -np.inf, -np.inf
        self._best = self.values.copy()

    def step(self) -> float:
        """A sweep each way, from messages that run ahead; returns the better bound of the two."""
        here = self.values.copy()
        if self._steps > 1:
            self.values += (self._steps - 1) / (self._steps + 2) * (here - self._before)
        forward, backward = self.sweep(True), self.sweep(False)
        self._steps = self._steps + 1 if backward >= self._bound else 1
        self._before, self._bound = here, backward
        if backward > self._best_bound:
            self._best, self._best_bound = self.values.copy(), backward
        return max(forward, backward)

    def is_moving(self, steps: int) -> bool:
        """Whether momentum has had more than so many steps to gather since its last restart."""
        return self._steps > steps

    def back_to_best(self) -> None:
        """Take the messages whose bound was the best since the costs were set."""
        if self._bound < self._best_bound:
            self.values[:], self._bound, self._steps = self._best, self._best_bound, 0

    def sweep(self, forward: bool) -> float:
        """One pass over all nodes; returns the lower bound."""
        values, minimum, total = self.values, np.minimum, 0.0
        order = range(len(self.nodes)) if forward else range(len(self.nodes) - 1, -1, -1)
        ports = self.ahead if forward else self.behind
        for s in order:
            inward = self.inward[s]
            if inward is None:
                total += float(self.costs[s].min())
                continue
            incoming = values[inward]
            beta = self.costs[s] + incoming.sum(axis=0)
            least = float(minimum.reduce(beta))
            total += least
            beta -= least
            beta *= self.share[s]
            for port in ports[s]:
                given = beta - incoming[port.row]
                if port.order is not None:
                    given = given[port.order]
                    if port.starts is not None:
                        given = minimum.reduceat(given, port.starts)
                matrix = self.matrices[port.edge]
                if port.along_rows:
                    message = minimum.reduce(matrix + given[:, None], axis=0)
                else:
                    message = minimum.reduce(matrix + given, axis=1)
                shift = float(minimum.reduce(message))
                total += shift
                message -= shift
                values[port.out] = message
        return total

    def round(self, forward: bool) -> list[int] | None:
        """A choice per node (by position): each the best given the choices behind it and the messages from ahead.

        None where the choices behind leave one nothing.
        """
        count = len(self.nodes)
        choice = [0] * count
        early, late = (self.behind, self.ahead) if forward else (self.ahead, self.behind)
        for s in range(count) if forward else range(count - 1, -1, -1):
            local = self.costs[s]
            inward = self.inward[s]
            if inward is not None:
                incoming = self.values[inward]
                for port in late[s]:
                    local = local + incoming[port.row]
                for port in early[s]:
                    local = local + self.given(port, choice[port.other])
            choice[s] = int(local.argmin())
            if local[choice[s]] == np.inf:
                return None
        return choice

    def given(self, port: Port, other_choice: int) -> FloatArray:
        """The edge cost of each choice of the port's node, the other node's choice being fixed."""
        there = port.other_class[other_choice]
        matrix = self.matrices[port.edge]
        return (matrix[:, there] if port.along_rows else matrix[there])[port.classes]

    def through(self, port: Port, costs: FloatArray) -> FloatArray:
        """The best that the port's node (with `costs`) and edge can do, for each choice of the other node."""
        given = costs
        if port.order is not None:
            given = given[port.order]
            if port.starts is not None:
                given = np.minimum.reduceat(given, port.starts)
        matrix = self.matrices[port.edge]
        if port.along_rows:
            best: FloatArray = np.minimum.reduce(matrix + given[:, None], axis=0)
        else:
            best = np.minimum.reduce(matrix + given, axis=1)
        return best[port.other_class]

    def reverse(self, port: Port, node: int) -> Port:
        """The same edge as its other node sees it; `node` is the port's own."""
        ports = self.behind[port.other] if port.other > node else self.ahead[port.other]
        return next(p for p in ports if p.edge == port.edge)

    def energy(self, choice: list[int]) -> float:
        """The priced cost of a choice of the core."""
        total = 0.0
        for s, i in enumerate(choice):
            total += float(self.costs[s][i])
            for port in self.ahead[s]:
                a, b = port.classes[i], port.other_class[choice[port.other]]
                total += float(self.matrices[port.edge][(a, b) if port.along_rows else (b, a)])
        return total

    def excess(self) -> tuple[float, list[FloatArray]]:
        """(lower bound, by how much it grows if the node at position p takes its choice i: [k] each).

        The bound, with w_u = beta_u / deg u - m_{e->u} at every edge e of u, is
        LB = sum_e min_{a,b} [ min_{i in a} w_u(i) + C_e(a, b) + min_{j in b} w_v(j) ]  (plus isolated nodes); with
        x_u = i every edge of u is at least w_u(i) + min_b [ C_e(i, b) + min_{j in b} w_v(j) ].
        """
        count = len(self.nodes)
        shares: list[FloatArray] = []
        for s in range(count):
            inward = self.inward[s]
            if inward is None:
                shares.append(self.costs[s][None])
            else:
                incoming = self.values[inward]
                shares.append((self.costs[s] + incoming.sum(axis=0)) / len(inward) - incoming)
        total = sum(float(self.costs[s].min()) for s in range(count) if self.inward[s] is None)
        grown = [np.zeros(len(c)) if self.inward[s] is not None else c - c.min() for s, c in enumerate(self.costs)]
        row_of = {(s, p.edge): p.row for s in range(count) for p in self.ahead[s] + self.behind[s]}
        for s in range(count):
            for port in self.ahead[s]:
                mine, theirs = shares[s][port.row], shares[port.other][row_of[port.other, port.edge]]
                matrix = self.matrices[port.edge] if port.along_rows else self.matrices[port.edge].T
                with_theirs = (matrix + class_min(theirs, port.other_class, matrix.shape[1])).min(axis=1)
                with_mine = (matrix + class_min(mine, port.classes, matrix.shape[0])[:, None]).min(axis=0)
                here, there = mine + with_theirs[port.classes], theirs + with_mine[port.other_class]
                least = float(here.min())
                total += least
                grown[s] += here - least
                grown[port.other] += there - least
        return total, grown


def _grouping(classes: IntArray) -> tuple[IntArray | None, IntArray | None]:
    count = int(classes.max()) + 1
    if count == len(classes):
        same = bool((classes == np.arange(count)).all())
        return (None if same else np.argsort(classes, kind="stable")), None
    order = np.argsort(classes, kind="stable")
    return order, np.searchsorted(classes[order], np.arange(count))
