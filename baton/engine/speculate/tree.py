"""Builds and reads trees of drafts: several guesses at the same place, verified in one step. Pure; torch-free.

Knows nothing of models, pages or chances. Nodes are listed in preorder: each after its parent, a subtree's nodes
together. ``parents[i]`` is the node before node i, -1 if that is the text's last token. In a step the text's last
token is row 0 and node i is row i + 1. Source: "SpecInfer" (https://arxiv.org/abs/2305.09781).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

ROOT = -1  # stands for the root, because rows count from 0


class RowChain(NamedTuple):
    """Names ``rows`` consecutive rows of a step from row ``first`` on, each the child of the row before; the first
    is row ``parent``'s child.
    """

    parent: int
    first: int
    rows: int


def tree_of(paths: Iterable[Sequence[int]], most: int) -> tuple[list[int], list[int]]:
    """Returns the tokens and parents of the tree of ``paths``, with common prefixes merged, limited to ``most``
    nodes; the first paths have priority.
    """
    tokens, below = list[int](), dict[int, dict[int, int]]()  # by node: its children by their tokens
    for path in paths:
        at = ROOT
        for token in path:
            children = below.setdefault(at, {})
            if token not in children:
                if len(tokens) == most:
                    break
                children[token] = len(tokens)
                tokens.append(token)
            at = children[token]
    order = list(_preorder(below, ROOT))
    place = {node: at for at, (node, _) in enumerate(order)} | {ROOT: ROOT}
    return [tokens[node] for node, _ in order], [place[parent] for _, parent in order]


def _preorder(below: Mapping[int, Mapping[int, int]], parent: int) -> Iterator[tuple[int, int]]:
    """Yields each node below ``parent`` and its parent, one subtree after the other."""
    for node in below.get(parent, {}).values():
        yield node, parent
        yield from _preorder(below, node)


def depths(parents: Sequence[int]) -> list[int]:
    """Returns each node's depth, 0 for those that follow the text's last token."""
    found = list[int]()
    for parent in parents:
        found.append(0 if parent == ROOT else found[parent] + 1)
    return found


def ranks(parents: Sequence[int]) -> list[int]:
    """Returns, for each node, how many siblings come before it."""
    seen, found = dict[int, int](), list[int]()
    for parent in parents:
        found.append(seen.get(parent, 0))
        seen[parent] = found[-1] + 1
    return found


def pruned(tokens: Sequence[int], parents: Sequence[int], kept: Iterable[int]) -> tuple[list[int], list[int]]:
    """Returns the tokens and parents of the tree reduced to the nodes ``kept``, which must include their
    ancestors.
    """
    nodes = sorted(kept)
    place = {node: at for at, node in enumerate(nodes)} | {ROOT: ROOT}
    return [tokens[node] for node in nodes], [place[parents[node]] for node in nodes]


def first_chain(parents: Sequence[int]) -> int:
    """Returns how many leading nodes form a chain, each the child of the one before."""
    return next((node for node, parent in enumerate(parents) if parent != node - 1), len(parents))


def chains(parents: Sequence[int]) -> list[RowChain]:
    """Returns the step's rows as chains: the first begins at row 0, each other one where a branch begins."""
    found = [RowChain(ROOT, 0, 1)]
    for node, parent in enumerate(parents):
        last = found[-1]
        if parent + 1 == node and last.first + last.rows == node + 1:
            found[-1] = last._replace(rows=last.rows + 1)
        else:
            found.append(RowChain(parent + 1, node + 1, 1))
    return found


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Returns the nodes from the first place to ``node``, itself included."""
    found = list[int]()
    while node != ROOT:
        found.append(node)
        node = parents[node]
    return found[::-1]


def walked(tokens: Sequence[int], parents: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Returns the accepted rows, row 0 first: each next one is the child with the token that the target chose.

    ``chosen[row]`` is the target's token after that row; it may end before the last rows if these weren't computed.
    """
    children = {(parent + 1, tokens[node]): node + 1 for node, parent in reversed(list(enumerate(parents)))}
    rows = [0]
    while rows[-1] < len(chosen) and (row := children.get((rows[-1], chosen[rows[-1]]))) is not None:
        if row >= len(chosen):
            break
        rows.append(row)
    return rows
