"""The gated delta rule. Each head has a state S, [key_dim, value_dim], and for every token

    S = exp(decay) S;  S = S + k (beta (v - S^T k))^T;  out = S^T q

`step` computes one token of many sequences. `chunks` computes many tokens of one sequence, CHUNK at a time: the updates
of a chunk are the solution of a triangular system, and what is left are products of matrices.
"""

import torch
from torch import Tensor

CHUNK = 64


def step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """q, k: [n, heads, key_dim]; v: [n, heads, value_dim]; decay, beta: [n, heads]; state: [n, heads, key, value_dim].

    Returns the result, [n, heads, value_dim], and the new state, which replaces the old one in memory: on a CPU, time
    goes into reading and writing states. The result is that of the old state, with what the token adds to it.
    """
    factor = decay.exp()[..., None]
    known, found = (torch.stack([k, q], dim=-2) @ state * factor[..., None]).unbind(dim=-2)
    new = (v - known) * beta[..., None]
    state.mul_(factor[..., None]).addcmul_(k[..., None], new[..., None, :])
    return found + (q * k).sum(dim=-1, keepdim=True) * new, state


def steps(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """As `chunks`, one token after the other: the result does not depend on where a sequence is divided."""
    out, state = torch.empty_like(v), state[None].clone()
    for token in range(len(q)):
        one = slice(token, token + 1)
        out[one], state = step(q[one], k[one], v[one], decay[one], beta[one], state)
    return out, state[0]


def chunks(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """q, k: [tokens, heads, key_dim]; v: [tokens, heads, value_dim]; decay, beta: [tokens, heads]; state: [heads, key,
    value_dim], float32. Returns the result, [tokens, heads, value_dim], and the new state."""
    num_tokens = len(q)
    q, k, v = (_in_chunks(x) for x in (q, k, v))  # [chunks, heads, CHUNK, dim]; padding changes nothing
    decay, beta = (_in_chunks(x[..., None])[..., 0] for x in (decay, beta))
    since = decay.cumsum(dim=-1)  # logarithm of the decay from the chunk's start up to each token
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (since[..., :, None] - since[..., None, :]).masked_fill(later, -torch.inf).exp()
    k_beta, from_start = k * beta[..., None], since.exp()[..., None]
    # a token corrects what the tokens before it left: (I + L) new = beta v - beta k S, with L below the diagonal
    system = (k_beta @ k.mT) * between
    both = torch.cat([v * beta[..., None], k_beta * from_start], dim=-1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within = (q @ k.mT) * between
    q_start, k_end = q * from_start, k * (since[..., -1:] - since).exp()[..., None]
    whole = since[..., -1].exp()[..., None, None]
    out = torch.empty_like(v)
    for index in range(len(q)):
        new = values[index] - keys[index] @ state
        out[index] = q_start[index] @ state + within[index] @ new
        state = state * whole[index] + k_end[index].mT @ new
    return out.transpose(1, 2).flatten(0, 1)[:num_tokens], state


def _in_chunks(x: Tensor) -> Tensor:  # [tokens, heads, dim] -> [chunks, heads, CHUNK, dim]
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -len(x) % CHUNK))
    return padded.unflatten(0, (-1, CHUNK)).transpose(1, 2)
