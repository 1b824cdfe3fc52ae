"""What is allocated at the moments of a step that can be its peak.

    forward          the last block, all others' activations saved
    loss             logits and what the loss makes of them
    output           backward of the output: its gradient, all activations saved
    last block       backward of the last block, all activations saved
    first block      backward of the first block, all gradients there
    embedding        the embedding's gradient, all gradients there
    optimizer        parameters, gradients, moments

Where each number comes from. Parameters, gradients and AdamW's two moments have
`training.dtype`. One rank alone runs under autocast: the residual stream stays fp32,
weights are cast to bf16 in each block (and kept for the backward where nothing is
checkpointed). Ranks that shard run bf16 blocks by FSDP2, which holds two blocks'
gathered weights and a block's gradients at a time.

What a compiled block saves and holds is read from Inductor's code for it (torch 2.13),
what an eager one does from the operators' results that are alive; steps of the trainer
on a CPU, whose allocations were added up, agree to 2% (`measure` repeats that).
Inductor fuses the three results of the activation's backward into one kernel, so that
ten widths F of bf16 are alive at once: that is where a block's peak lies, unless heads
are wider than F. The workspaces of attention follow from the code of `ring` and
`kernels_triton`; those of FLASH (its fp32 accumulators) and of the templates were
fitted to peaks measured on an H200 (recipes/results/h200_kernels.md).

Letters: d model width, a = H D, k = HK D, F feed-forward width, V vocabulary, T tokens
of a rank and pass, e bytes of the residual stream.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from recipes.planning.hardware import Hardware
from recipes.planning.problem import Problem, saved_linears
from recipes.planning.traffic import column_bytes, dkv_bytes, kv_bytes

# What the columns' backward launches at most (kernels_triton.vertical_slash), and the
# columns of its tile: partial sums, fp32.
COLUMN_PROGRAMS, COLUMN_TILE = 2112, 128

CATEGORIES = (
    "parameters",
    "optimizer",
    "gradients",
    "activations",  # saved between forward and backward
    "logits",
    "working set",  # of the block or operator that runs
    "KV buffers",  # keys, values and their gradients that travel
    "index tensors",  # patterns of all layers, tables or lists of a step
    "sharding",  # gathered weights and gradients on their way
    "library workspace",
)


@dataclass(frozen=True)
class Memory:
    """The peak of one rank, bytes."""

    moment: str
    moments: dict[str, dict[str, float]]  # bytes by category at each moment

    @property
    def parts(self) -> dict[str, float]:
        return self.moments[self.moment]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def largest(self, category: str) -> float:
        """The most that a category takes at any moment."""
        return max(parts[category] for parts in self.moments.values())


def peak_memory(problem: Problem, hardware: Hardware) -> Memory:
    """The largest of a step's moments, after the first step."""
    moments = {
        moment: {name: parts.get(name, 0.0) for name in CATEGORIES}
        for moment, parts in _moments(problem, hardware).items()
    }
    return Memory(max(moments, key=lambda x: sum(moments[x].values())), moments)


def _moments(problem: Problem, hardware: Hardware) -> dict[str, dict[str, float]]:
    model, T, V = problem.model, problem.tokens, problem.model.vocab
    d, e, L = model.dim, problem.residual_bytes, model.layers
    share = problem.state_bytes / problem.shard
    always = {
        "parameters": model.parameters * share,
        "optimizer": 2 * model.parameters * share,
        "library workspace": hardware.workspace_mib * 2**20,
    }
    saved = saved_bytes(problem)
    patterns = pattern_bytes(problem)
    # Tokens, labels, positions and their order, int64; the rotary table, fp32. The last
    # block's output and the final norm's bf16 result wait for the output's backward.
    inputs = 4 * 8 * T + 4 * problem.layout.local_len * model.head_dim
    last = T * (e * d + 2 * d + 4)
    weight = 0 if problem.fsdp else 2 * model.vocab_weights  # autocast's copy
    cached = 0.0  # autocast's copies of eager blocks, until the loss is in
    if not (problem.fsdp or problem.compiled or problem.checkpointing == "none"):
        cached = 2.0 * L * model.block_weights
    # With several passes the sums of the earlier ones are there all along.
    before = model.parameters * share if problem.passes > 1 else 0.0
    vocab_grad = model.vocab_weights * share
    all_grads = model.parameters * share
    block_grads = model.block_parameters * share
    gathered = _sharding(problem)

    def moment(layers: float, **parts: float) -> dict[str, float]:
        held = dict(always)
        held["activations"] = layers * saved + inputs
        held["index tensors"] = L * patterns
        for name, size in parts.items():
            name = _CATEGORY[name]
            held[name] = held.get(name, 0.0) + size
        return held

    # bf16 logits; eager: an fp32 copy and log_softmax, then its gradient twice. Of
    # autocast's copies nothing is left in the backward.
    ahead, behind = (2, 4) if problem.compiled_loss else (10, 12)
    logits, waiting = (float(V * T), float(V * T)), 0.0
    if problem.loss_chunk > 0:
        # Those of a chunk and their gradient; then none. In both moments the gradients
        # of the hidden states and, in fp32 and once more in bf16, of the weight.
        logits = (float(V * min(problem.loss_chunk, T)), 0.0)
        ahead = behind = 4 if problem.compiled_loss else 19
        waiting = 2 * d * T + (4 + 2) * model.vocab_weights
    cached_first = cached > (behind - ahead) * V * T
    forward = attention_workspace(problem, backward=False)
    # Working set, KV buffers, index tensors.
    feed, attend = (working_set(problem), 0.0, 0.0), attention_set(problem)
    block = max(feed, attend, key=sum)
    # Of a block's gradients none is there in its feed-forward, about half in attention.
    later = block_grads / 2 if block is attend else block_grads
    moments = {
        "forward": moment(
            L,
            working=T * (2 * d + 4 * model.hidden) + forward[0] + cached,
            kv=forward[1],
            index=forward[2],
            sharding=gathered["block"],
            gradients=before,
        ),
        "loss": moment(
            L,
            logits=logits[0] * (ahead if cached_first else behind),
            working=last + weight + waiting + cached * cached_first,
            sharding=gathered["output"],
            gradients=before,
        ),
        "output": moment(
            L,
            # Its own gradient, bf16 and then fp32, beside those of the logits.
            logits=logits[1] * (2 if problem.compiled_loss else 6),
            working=last + weight + (waiting or 2 * d * T + 2 * model.vocab_weights),
            sharding=gathered["output"],
            gradients=before + vocab_grad,
        ),
        "last block": moment(
            L,
            working=block[0] + e * d * T,
            kv=block[1],
            index=block[2],
            sharding=gathered["block backward"],
            gradients=before + vocab_grad + block_grads - later,
        ),
        "first block": moment(
            1,
            working=block[0] + e * d * T,
            kv=block[1],
            index=block[2],
            sharding=gathered["block backward"],
            gradients=before + all_grads - (0 if model.tied else vocab_grad) - later,
        ),
        "embedding": moment(
            0,
            working=e * d * T + (vocab_grad * problem.shard if model.tied else 0.0),
            sharding=gathered["output"],
            gradients=before + all_grads,
        ),
        "optimizer": moment(
            0,
            gradients=all_grads,
            working=all_grads if problem.optimizer == "foreach" else 0.0,
        ),
    }
    return moments


_CATEGORY = {
    "working": "working set",
    "kv": "KV buffers",
    "index": "index tensors",
    "logits": "logits",
    "sharding": "sharding",
    "gradients": "gradients",
}


# --- blocks ---------------------------------------------------------------------------


def saved_bytes(problem: Problem) -> float:
    """What one block keeps between forward and backward, without its pattern.

    The block's input is counted, its output is the next one's input.
    """
    return sum(saved_parts(problem).values())


def saved_parts(problem: Problem) -> Mapping[str, float]:
    """The same by tensor."""
    model, T = problem.model, problem.tokens
    d, F = model.dim, model.hidden
    a, k = model.heads * model.head_dim, model.kv_heads * model.head_dim
    per_token: dict[str, float] = {"input": problem.residual_bytes * d}
    weights = 0.0
    if problem.checkpointing != "full":
        per_token |= {"out": 2 * a, "lse": 4 * model.heads}
    if problem.checkpointing == "selective":
        per_token |= {x.name: 2 * x.out_features for x in saved_linears(problem)}
    if problem.checkpointing == "none":
        per_token |= {"q, k, v": 2 * a + 4 * k, "norms": 8}
        if problem.compiled:
            per_token |= {"normed": 4 * d, "wo": 2 * d, "w1, w3, product": 6 * F}
        else:
            # Each product casts its own copy of the norm's fp32 result.
            copies = 5 if problem.residual_bytes == 4 else 2
            per_token |= {"normed": 2 * copies * d, "h": problem.residual_bytes * d}
            per_token |= {"w1, silu, w3, product": 8 * F}
        weights = 0.0 if problem.fsdp else 2.0 * model.block_weights
    return {**{name: T * size for name, size in per_token.items()}, "weights": weights}


def working_set(problem: Problem) -> float:
    """Of the feed-forward's backward, beyond what the block has saved.

    Without the gradient that comes in.
    """
    model, T, e = problem.model, problem.tokens, problem.residual_bytes
    d, F = model.dim, model.hidden
    a, k = model.heads * model.head_dim, model.kv_heads * model.head_dim
    cast = 2 * d if e == 4 else 0  # the incoming gradient in bf16
    weights = 0.0 if problem.fsdp else 2.0 * (F * d + a * d)
    saved = {x.name: x for x in saved_linears(problem)}
    if problem.checkpointing == "none":
        return T * (cast + 2.0 * F if problem.compiled else 4.0 * F)
    if problem.compiled:
        size = cast + 2 * d * ("wo" not in saved) + 4 + 2 * d + 10 * F
        if problem.checkpointing == "full":
            size += 2 * d + 4 + 4 * a + 4 * k + 4 * model.heads + 2 * F
        return T * size + weights
    size = e * d + (10 * d if e == 4 else 4 * d) + 2 * a + 2 * k + 8 + 10 * F
    size += 2 * k * ("wv" not in saved)
    # What was saved and no gradient needs goes as soon as it is handed out again.
    size -= sum(2 * saved[x].out_features for x in saved if x in ("wq", "wo", "w2"))
    if problem.checkpointing == "full":
        size += 2 * a + 4 * model.heads + 2 * F
    return T * size + (0.0 if problem.fsdp else 2.0 * model.block_weights)


def attention_set(problem: Problem) -> tuple[float, float, float]:
    """Of attention's backward, beyond what the block has saved: working set, KV
    buffers, index tensors. What the feed-forward had saved is gone by then."""
    model, T, e = problem.model, problem.tokens, problem.residual_bytes
    d, F = model.dim, model.hidden
    a, k = model.heads * model.head_dim, model.kv_heads * model.head_dim
    cast = 2 * d if e == 4 else 0
    saved = {x.name for x in saved_linears(problem)}
    size: float = e * d + cast + 2 * a  # gradients of h and of out
    if problem.checkpointing == "none":
        size += 4 * d - (6 * F + 2 * d if problem.compiled else 8 * F + 4 * d)
    else:
        size += 6 * d + 2 * d * ("wo" not in saved) + 2 * a + 4 * k - 2 * F
        size += 2 * a * ("wq" not in saved and problem.checkpointing != "full")
        if problem.checkpointing == "full":
            size += 2 * a + 2 * k + 4 * model.heads + 2 * F
    work, kv, index = attention_workspace(problem, backward=True)
    if not problem.compiled:
        work = max(work, T * 14.0 * a)  # the rotation's backward in fp32, unfused
    return T * size + work, kv, index


# --- attention ------------------------------------------------------------------------


def attention_workspace(problem: Problem, backward: bool) -> tuple[float, float, float]:
    """Inside the operator, with its results: working set, KV buffers, index tensors."""
    model, T = problem.model, problem.tokens
    a = model.heads * model.head_dim * T
    k = model.kv_heads * model.head_dim * T
    rows = 4.0 * model.heads * T  # one number of each row, fp32
    columns = column_bytes(problem, 2)
    alone = problem.cp == 1
    if not backward:
        if problem.backend == "triton":
            size = (2 if alone else 8) * a + 2 * rows
        elif problem.backend == "flash":
            size = (4 if alone else 10) * a + 3 * rows
        else:
            size = (6 if alone else 10) * a + 4 * rows
    elif problem.backend == "triton":
        # dq; dk, dv in fp32; then the columns' partial sums, or copies of dk and dv.
        dq = (2 if alone else 8) * a
        size = dq + 8 * k + 2 * rows + max(_column_partials(problem), 4 * k)
    elif problem.backend == "flash":
        # FLASH sums dq, dk and dv in fp32 beside its bf16 results.
        size = (6 if alone else 14) * a + 12 * k + 6 * rows
    else:
        size = (6 if alone else 12) * a + 12 * k + 3 * rows
    return size + columns, ring_buffers(problem, backward), step_index_bytes(problem)


def _column_partials(problem: Problem) -> float:
    """Partial sums of the columns' dk and dv, and their sum, fp32."""
    model = problem.model
    whole = column_bytes(problem, 4)
    if not whole:
        return 0.0
    tiles = problem.column_blocks * problem.layout.granularity / COLUMN_TILE
    programs = problem.batch * model.heads * max(tiles, 1)
    parts = max(1, min(COLUMN_PROGRAMS // programs, problem.layout.local_blocks, 32))
    return (parts + 1 if parts > 1 else 1) * whole


def ring_buffers(problem: Problem, backward: bool) -> float:
    """Keys and values, and their gradients, that lie beside what a step computes.

    Counted on `mtraining_flex.ring.drive`. Of keys and values: the round's own, those
    of this step and the next, the next round's, or all of a gather. Of gradients: the
    sum that leaves, the one that comes, the last step's part, and the same two between
    nodes.
    """
    if problem.cp == 1:
        return 0.0
    two_level = problem.rotation == "two_level"
    ranks = problem.node_ranks if two_level else problem.cp  # of a round
    if "allgather" in (problem.rotation, problem.inner_rotation):
        held, sums = 1 + ranks, ranks + 1
    else:
        held, sums = min(ranks, 3), min(ranks, 3)
    size = (held + two_level) * kv_bytes(problem)
    return size + ((sums + 2 * two_level) * dkv_bytes(problem) if backward else 0)


def pattern_bytes(problem: Problem) -> float:
    """The pattern of one layer, int32, which is saved for the backward."""
    if problem.pattern == "dense":
        return 4.0 * (problem.max_slash + 2)
    heads = problem.batch * problem.model.heads
    return 4.0 * heads * (problem.max_slash + problem.max_vertical + 2)


def step_index_bytes(problem: Problem) -> float:
    """Bitmap, and the lists or tables of one slash step and of the vertical step."""
    layout = problem.layout
    n, J = layout.local_blocks, problem.column_blocks
    heads = problem.batch * problem.model.heads
    if problem.pattern == "dense":
        heads = 1
    bitmap = 2 * layout.num_blocks * heads
    segments = len(layout.segments(0)) ** 2
    columns = J * layout.granularity
    lists = 4 * heads * problem.max_slash * segments
    column_lists = 4 * heads * (columns + 2 * n)
    if problem.backend == "triton":
        return bitmap + lists + column_lists
    # Two lists of full blocks, one of diagonal ones; counts of all four.
    width = min(problem.max_slash, n)
    tables = 4 * heads * n * (3 * width + 3)
    if problem.backend == "flash":
        return bitmap + tables + column_lists
    vertical = 4 * heads * (2 * n * J + 2 * n + 2 * J + 2 * columns)
    return bitmap + tables + vertical


# --- sharding -------------------------------------------------------------------------


def _sharding(problem: Problem) -> dict[str, float]:
    """FSDP2's buffers: gathered bf16 weights, and gradients before and while they are
    scattered. The output stays gathered from its forward to its backward, a tied
    embedding throughout."""
    if not problem.fsdp:
        return dict.fromkeys(("block", "block backward", "output"), 0.0)
    model = problem.model
    block, vocab = 2.0 * model.block_parameters, 2.0 * model.vocab_weights
    tied = vocab if model.tied else 0.0
    # Running and prefetched weights; bf16 gradients; their fp32 copy that is scattered,
    # which is let go when the next block's is made.
    return {
        "block": 2 * block + tied,
        "block backward": 2 * block + block + 2 * block + tied,
        "output": vocab + vocab + 2 * vocab,
    }
