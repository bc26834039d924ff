"""Sampling for many requests at once: requests join and leave between decode steps.

    Generator     `add`, `step` until `has_work` is false, `cancel` at any time between steps
    SampleDone    the result of a request, or its error

The life of a request: it waits until its prompt and one sample fit in the cache at their greatest length; the prompt
is prefilled in chunks, each of them between two decode steps of the others; the first tokens of all its samples are
drawn from the one prefill; each sample then decodes as soon as the cache has room for it. What was admitted is never
evicted, so nothing is computed twice. Whoever has the fewest samples running is admitted first, and of one owner's
requests the one that came first: a crowd of one owner's samples does not hold up another's.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinsmith.errors import InvalidInputError, TinkerError
from tinsmith.server.engine.adapters import FrozenAdapter
from tinsmith.server.engine.decode import PlainDecoder
from tinsmith.server.engine.kv_cache import Blocks, BlockTable, Ints, KvPool, prefix_keys
from tinsmith.server.engine.lora import LoraRows, linear
from tinsmith.server.engine.model import Transformer
from tinsmith.server.engine.paged_attention import prefill_attention
from tinsmith.server.engine.prompt_scores import PromptScores
from tinsmith.server.engine.running import Batch, Decoder, DrawnRows, Key, Request, Sample, SampleWork, segments_of
from tinsmith.server.engine.steps import has_kernels
from tinsmith.server.engine.stopping import Stopper
from tinsmith.server.engine.turns import Turns
from tinsmith.types import SampledSequence, SampleResponse, TopkLogprobs

BLOCK_SIZE = 16
# Prompt tokens computed between two decode steps: enough to keep the device busy, and no more.
PREFILL_TOKENS = {"cuda": 4096, "cpu": 256}

# Logits of a prompt are made for this many positions at a time: a large vocabulary makes them heavy.
_SCORED_AT_ONCE = 64

# No product of two such weights and a hidden state overflows.
_LARGEST_WEIGHT = 1e6


@dataclass(frozen=True)
class SampleDone:
    """Exactly one of `response` and `error` is set."""

    key: Key
    response: SampleResponse | None = None
    error: TinkerError | None = None


class Generator:
    """Owns the cache and the running batch of one model. Not thread-safe: one loop calls it."""

    def __init__(
        self,
        model: Transformer,
        kv_tokens: int,
        end_of_text: Collection[int] = (),
        *,
        max_context: int | None = None,
        block_size: int = BLOCK_SIZE,
        prefill_tokens: int | None = None,
    ) -> None:
        self.model = model
        self.end_of_text = frozenset(end_of_text)
        self.max_context = min(max_context or model.shape.max_context, model.shape.max_context)
        self.prefill_tokens = prefill_tokens or PREFILL_TOKENS.get(model.device.type, 256)
        self.blocks = Blocks(max(kv_tokens // block_size, 1), block_size)
        num_slots = self.blocks.num_blocks * block_size
        self.pool = KvPool(model.shape, num_slots + block_size, model.compute_dtype, model.device)
        self._decoder = _decoder_for(model, self.pool, self.blocks)
        self.num_prefilled_tokens = 0
        """How many prompt tokens were computed, not found in the cache, since the start."""
        self.num_found_tokens = self.num_sampled_tokens = self.num_decode_steps = self.num_decoded_samples = 0

        self._arrivals = itertools.count()
        self._names: WeakKeyDictionary[FrozenAdapter, bytes] = WeakKeyDictionary()
        self._requests: dict[Key, Request] = {}
        self._waiting = Turns[Request](_owner_of)
        self._prefilling = Turns[Request](_owner_of)
        self._undecided = Turns[Sample](lambda sequence: _owner_of(sequence.request))
        """Samples with a first token that wait for room in the cache."""

        self._batch = Batch([], model)
        self._done: list[SampleDone] = []

    # --- requests ---

    def add(self, work: SampleWork) -> None:
        """Take a request. What is wrong with it becomes its result; it never raises for bad input."""
        if work.key in self._requests:
            raise ValueError(f"The key {work.key!r} is in use by an unfinished request")
        try:
            request = self._checked(work)
        except InvalidInputError as error:
            self._done.append(SampleDone(work.key, error=error))
            return
        self._requests[work.key] = request
        self._waiting.add(request)

    def cancel(self, key: Key) -> None:
        """Forget an unfinished request; its room is free at once. An unknown key is nothing to cancel."""
        if (request := self._requests.pop(key, None)) is not None:
            self._drop(request)

    def samples(self, key: Key) -> Sequence[Sample]:
        """Those of an unfinished request, as far as they are; none before their first tokens."""
        request = self._requests.get(key)
        return () if request is None else request.samples

    def has_work(self) -> bool:
        return bool(self._requests or self._done or self._decoder.is_behind)

    def step(self) -> list[SampleDone]:
        """A chunk of prompts if any wait, then one token for every running sample; returns what finished.

        If the device fails (out of memory), the error passes through and the step can be repeated.
        """
        with torch.inference_mode():
            self._start_decoding()
            self._admit()
            if self._prefilling:
                self._prefill()
                self._start_decoding()
            if self._batch.rows or self._decoder.is_behind:
                self._decode()
        done, self._done = self._done, []
        return done

    # --- checks ---

    def _checked(self, work: SampleWork) -> Request:
        prompt = _prompt_array(work.prompt, self.model.shape.vocab_size)
        params = work.params
        max_tokens = self._max_tokens(len(prompt), params.max_tokens, work.num_samples)
        seed = (secrets.randbits(64) if params.seed is None else params.seed) % 2**64
        scores = PromptScores(
            prompt,
            self.model.shape.vocab_size,
            logprobs=work.prompt_logprobs,
            topk=work.topk_prompt_logprobs,
            last_n=work.prompt_logprobs_last_n,
            targets=work.target_prompt_logprobs,
            alternatives=work.prompt_alt_tokens_k,
            temperature=params.temperature,
            seed=seed,
        )
        stopper = Stopper.of(params, self.end_of_text, work.decode, work.end_tokens)
        keys = prefix_keys(self._whose(work), prompt, self.blocks.block_size)
        request = Request(work, prompt, max_tokens, stopper, seed, scores, keys, next(self._arrivals))
        self._refuse_too_large(request)
        return request

    def _max_tokens(self, prompt_length: int, asked: int | None, num_samples: int) -> int:
        # The last token sampled is never fed back, so it needs no place: a prompt as long as the context can be scored.
        room = self.max_context - prompt_length + 1
        if prompt_length > self.max_context or (asked is not None and asked > room):
            wanted = "" if asked is None else f" plus max_tokens of {asked}"
            remedy = f"ask for at most {room} tokens" if room > 0 else "shorten the prompt"
            raise InvalidInputError(
                f"A prompt of {prompt_length} tokens{wanted} exceeds the context of {self.max_context}; {remedy}.",
                field="prompt" if room <= 0 else "sampling_params.max_tokens",
                value=prompt_length if room <= 0 else asked,
            )
        if asked is not None:
            return asked
        # Left to us, prompt and sample together fit the context, so that they can be trained on, and into the cache.
        num_blocks, shared = self.blocks.num_blocks, 0
        if num_samples > 1:  # each has the rest of the prompt once more
            num_blocks -= self.blocks.needed_for(prompt_length)
            shared = self._num_shared_blocks(prompt_length, num_samples)
        longest = min(self.max_context, (num_blocks + shared) * self.blocks.block_size)
        return max(longest - prompt_length, 1)

    def _refuse_too_large(self, request: Request) -> None:
        needed = self._prompt_blocks(request) + self._tail_blocks(request)
        if needed > self.blocks.num_blocks:
            size = self.blocks.block_size
            raise InvalidInputError(
                f"A prompt of {len(request.prompt)} tokens with max_tokens of {request.max_tokens} needs a cache of "
                f"{needed * size} tokens, and this server has {self.blocks.num_blocks * size}; ask for fewer tokens, "
                "or give the server more memory, of which its cache gets a share.",
                field="sampling_params.max_tokens",
                value=request.max_tokens,
            )

    def _whose(self, work: SampleWork) -> bytes:
        """A name for whose keys and values a cached block holds; never used for a second adapter or owner."""
        name = b"base"
        if (adapter := work.adapter) is not None:
            if adapter not in self._names:
                _refuse_broken(adapter)
                self._names[adapter] = secrets.token_bytes(16)
            name = self._names[adapter]
        return name + work.owner.encode()

    # --- room in the cache ---

    def _num_shared_blocks(self, prompt_length: int, num_samples: int) -> int:
        """How many blocks of the prompt its samples refer to; the rest of it each of them copies."""
        full = prompt_length // self.blocks.block_size
        return full if self._pays_to_share(full, num_samples) else 0

    def _pays_to_share(self, num_blocks: int, num_readers: int) -> bool:
        """Reading a prefix apart from the rest costs each step a call and a join; reading it once saves its tokens.

        Others may come to share the prefix of a single reader, so that is counted as three. Where blocks are found
        through tables on the device, all this costs nothing.
        """
        saved_tokens = num_blocks * self.blocks.block_size * (num_readers - 1 if num_readers > 1 else 2)
        return saved_tokens >= 2 * self._decoder.call_cost_tokens

    def _prompt_blocks(self, request: Request) -> int:
        own_tokens = max(request.max_tokens - 1, 0) if request.work.num_samples == 1 else 0
        return self.blocks.needed_for(len(request.prompt) + own_tokens)

    def _tail_blocks(self, request: Request) -> int:
        """What each of several samples needs beside the blocks it shares."""
        if request.work.num_samples == 1 or request.max_tokens <= 1:
            return 0
        shared_blocks = self._num_shared_blocks(len(request.prompt), request.work.num_samples)
        shared_tokens = shared_blocks * self.blocks.block_size
        return self.blocks.needed_for(len(request.prompt) + request.max_tokens - 1 - shared_tokens)

    def _admit(self) -> None:
        """Let requests in by turns; one whose beginning is being computed for another waits for that.

        Samples of those that are in already come first, but not before requests of an owner who has fewer.
        """
        if not self._waiting:
            return
        held = self._held()
        computing = {key for request in self._prefilling for key in request.keys}
        for request in self._waiting.in_turn(held):
            if any(held[owner] <= held[_owner_of(request)] for owner in self._undecided.owners):
                break
            if self._undecided and not self._leaves_room(request):
                break
            usable = request.keys[: min(request.scores.first_state, len(request.prompt) - 1) // self.blocks.block_size]
            found = self.blocks.find(usable)
            if len(found) < len(usable) and usable[len(found)] in computing:
                continue
            # Blocks found may be the very room that is needed; then the request does without them.
            if not (self._make_room(request, found) or (len(found) and self._make_room(request, found[:0]))):
                break
            self._waiting.remove(request)
            self._prefilling.add(request)
            computing.update(request.keys)

    def _make_room(self, request: Request, found: Ints) -> bool:
        is_alone = request.work.num_samples == 1
        referred = found if not is_alone or self._pays_to_share(len(found), 1) else found[:0]
        num_new = self._prompt_blocks(request) - len(referred)
        num_tail = self._tail_blocks(request)
        num_unused_found = int(np.count_nonzero(self.blocks.references[found] == 0))
        if num_new + num_tail > self.blocks.num_available - num_unused_found:
            return False
        self.blocks.share(found)
        new = self.blocks.allocate(num_new)
        request.table = BlockTable(referred, new, self.blocks.block_size)
        request.tail = self.blocks.allocate(num_tail) if num_tail else None
        request.num_prefilled = request.num_cache_hits = len(found) * self.blocks.block_size
        self.num_found_tokens += request.num_cache_hits
        if len(referred) < len(found):
            self._copy_tokens(
                BlockTable(found, found[:0], self.blocks.block_size), 0, request.table, 0, request.num_prefilled
            )
            self.blocks.release(found)
        return True

    def _copy_tokens(self, source: BlockTable, start: int, target: BlockTable, target_start: int, count: int) -> None:
        if count:
            self.pool.copy(source.slots[start : start + count], target.slots[target_start : target_start + count])

    def _start_decoding(self) -> None:
        """Give samples the room they wait for, by turns; a request of an owner who has fewer may need it first."""
        room = self._decoder.max_rows - len(self._batch.rows)
        if room <= 0 or not self._undecided:
            return
        held, others, started, is_full = self._held(), self._others(), list[Sample](), False
        for sequence in self._undecided.in_turn(held):
            request, own = sequence.request, held[_owner_of(sequence.request)]
            if request.work.num_samples == 1:
                sequence.table, request.table = request.table, None
            elif request.tail is not None:
                self._branch(sequence)  # nobody else could have the room that is set aside
            elif is_full or any(held[owner] < own for owner in others) or not self._branch(sequence):
                is_full = True
                continue
            self._undecided.remove(sequence)
            started.append(sequence)
            if len(started) == room:
                break
        for request in {sequence.request for sequence in started}:
            self._release_prompt_if_idle(request)
        self._batch = self._batch.replaced([*self._batch.rows, *started])

    def _others(self) -> list[str]:
        """Owners who wait for room that samples would take, and may have it as soon as those that run have ended."""
        if len(self._waiting.owners | self._undecided.owners) < 2:
            return []
        first = {_owner_of(request): request for request in reversed([*self._waiting])}
        return [owner for owner, request in first.items() if self._leaves_room(request)]

    def _leaves_room(self, request: Request) -> bool:
        """Whether one sample of each request that is in could still run, were this one in, too.

        The prompts of those for several samples stay until all of these have begun. If no room were left beside them,
        each would wait for the others for ever. What runs, or has its room already, ends by itself.
        """
        requests = {id(each): each for each in (*self._prefilling, *(sample.request for sample in self._undecided))}
        staying = [each for each in requests.values() if each.work.num_samples > 1]
        prompts = {block for each in staying if each.table is not None for block in each.table.blocks.tolist()}
        tail = max(map(self._tail_blocks, [request, *staying]))
        return len(prompts) + self._prompt_blocks(request) + tail <= self.blocks.num_blocks

    def _held(self) -> Counter[str]:
        """How many samples those who wait have that run, or will as soon as their prompt is computed."""
        if len(self._waiting.owners | self._undecided.owners) < 2:
            return Counter()  # there is nobody to compare with
        requests = itertools.chain((row.request for row in self._batch.rows), self._prefilling)
        return Counter(map(_owner_of, requests))

    def _branch(self, sequence: Sample) -> bool:
        """A table that shares the prompt's full blocks, if that pays, and has the rest to itself."""
        request, size = sequence.request, self.blocks.block_size
        assert request.table is not None
        if request.tail is not None:
            tail, request.tail = request.tail, None
        elif (count := self._tail_blocks(request)) <= self.blocks.num_available:
            tail = self.blocks.allocate(count)
        else:
            return False
        shared = request.table.blocks[: self._num_shared_blocks(len(request.prompt), request.work.num_samples)]
        self.blocks.share(shared)
        sequence.table = BlockTable(shared, tail, size)
        start = len(shared) * size
        self._copy_tokens(request.table, start, sequence.table, start, len(request.prompt) - start)
        return True

    def _release_prompt_if_idle(self, request: Request) -> None:
        """The prompt's own blocks are needed until the last sample has branched off or ended."""
        if any(sequence.request is request for sequence in self._undecided):
            return
        if request.table is not None:
            self.blocks.release(request.table.blocks)
        if request.tail is not None:
            self.blocks.release(request.tail)
        request.table = request.tail = None

    # --- prefill ---

    def _prefill(self) -> None:
        pieces = self._next_pieces()
        slots, past = [], []
        for request, start, end in pieces:
            assert request.table is not None
            slots.append(request.table.slots[start:end])
            past.append((end - start, request.table.runs(start)))
        lora = LoraRows(segments_of((end - start, request.adapter) for request, start, end in pieces))
        hidden = self.model.hidden(
            self._tensor(np.concatenate([request.prompt[start:end] for request, start, end in pieces])),
            self._tensor(np.concatenate([np.arange(start, end) for _, start, end in pieces])),
            prefill_attention(self.pool, np.concatenate(slots), past, deterministic=self.model.deterministic),
            lora,
        )
        states = hidden.split([end - start for _, start, end in pieces])
        for (request, start, _), state in zip(pieces, states, strict=True):
            self._score(request, start, state)
        ready = [piece for piece in zip(pieces, states, strict=True) if piece[0][2] == len(piece[0][0].prompt)]
        first = self._draw_first([request for (request, _, _), _ in ready], [state[-1] for _, state in ready])
        # All that can fail on the device is behind us; what follows changes the state.
        for request, start, end in pieces:
            request.num_prefilled = end
            self.num_prefilled_tokens += end - start
        self._finish_prefill([request for (request, _, _), _ in ready], *first)

    def _next_pieces(self) -> list[tuple[Request, int, int]]:
        """The next stretches of prompts, by turns, as much as one chunk takes; those of one adapter together."""
        # Larger chunks are a sixth faster; with nobody to keep waiting they cost nothing.
        pieces, room = [], self.prefill_tokens if self._batch.rows else 2 * self.prefill_tokens
        for request in self._prefilling.in_turn(Counter()):
            end = min(request.num_prefilled + room, len(request.prompt))
            pieces.append((request, request.num_prefilled, end))
            room -= end - request.num_prefilled
            if not room:
                break
        return sorted(pieces, key=lambda piece: (self._whose(piece[0].work), piece[2] - piece[1]))

    def _score(self, request: Request, start: int, states: Tensor) -> None:
        first = max(request.scores.first_state, start)
        end = min(start + len(states), len(request.prompt) - 1)
        for begin in range(first, end, _SCORED_AT_ONCE):
            part = states[begin - start : min(begin + _SCORED_AT_ONCE, end) - start]
            lora = LoraRows(segments_of([(len(part), request.adapter)]))
            request.scores.add(begin, self.model.logits(part, lora))

    def _draw_first(self, requests: list[Request], states: list[Tensor]) -> tuple[Batch, DrawnRows]:
        """The first token of every sample of these prompts, from the last hidden state of each."""
        for request in requests:
            request.samples = [Sample(request, index) for index in range(request.work.num_samples)]
        rows = [index for index, request in enumerate(requests) if request.max_tokens > 0 for _ in request.samples]
        batch = Batch([row for request in requests if request.max_tokens > 0 for row in request.samples], self.model)
        if not rows:
            return batch, DrawnRows([], [], [])
        lora = LoraRows(segments_of((1, request.adapter) for request in requests))
        logits = linear(torch.stack(states), self.model.head, lora, "lm_head")
        return batch, self._decoder.draw(batch, logits[torch.tensor(rows, device=logits.device)])

    def _finish_prefill(self, requests: list[Request], batch: Batch, drawn: DrawnRows) -> None:
        """Take the first tokens; the samples that go on wait for room, and the prompt can be found by others."""
        for request in requests:
            assert request.table is not None
            self._prefilling.remove(request)
            self.blocks.remember(request.keys, request.table.blocks[: len(request.keys)])
        self._take(batch, drawn)
        for row in batch.rows:
            if row.stop_reason is None and row.request.work.key in self._requests:
                self._undecided.add(row)
        for request in requests:
            if request.max_tokens == 0:
                for sequence in request.samples:
                    sequence.stop_reason = "length"
                self._finish_if_complete(request)

    # --- decode ---

    def _decode(self) -> None:
        launched = self._batch.rows
        outcome = self._decoder.step(self._batch)
        self.num_decode_steps += bool(launched)
        self.num_decoded_samples += len(launched)
        for row in launched:
            row.num_in_flight += 1
        if outcome is not None:
            for row in outcome.batch.rows:
                row.num_in_flight -= 1
            self._take(*outcome)
        going_on = [row for row in self._batch.rows if row.goes_on]
        if len(going_on) < len(self._batch.rows):
            self._batch = self._batch.replaced(going_on)

    def _tensor(self, array: npt.NDArray[np.integer[npt.NBitBase]]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(self.model.device)

    def _take(self, batch: Batch, drawn: DrawnRows) -> None:
        """Append what was drawn; end the samples that are complete."""
        self.num_sampled_tokens += len(batch.rows)
        for row, sequence in enumerate(batch.rows):
            request = sequence.request
            if self._requests.get(request.work.key) is not request or sequence.stop_reason is not None:
                continue  # it was cancelled, or a sibling failed, or it had stopped before this step was launched
            if not math.isfinite(drawn.logprobs[row]):
                self._fail(sequence.request, _not_finite(sequence))
                continue
            sequence.tokens.append(drawn.tokens[row])
            sequence.logprobs.append(drawn.logprobs[row])
            if count := sequence.request.work.topk_sample_logprobs:
                sequence.topk.append(drawn.topk[row][:count])
            self._stop_if_done(sequence)

    def _stop_if_done(self, sequence: Sample) -> None:
        request = sequence.request
        try:
            stopped = request.stopper.stops(sequence.tokens)
        except Exception as error:  # noqa: BLE001 (a tokenizer may raise anything; that is this request's problem alone)
            self._fail(request, InvalidInputError(
                f"The tokenizer could not decode the sampled tokens to look for stop texts ({error}); pass token ids "
                "as `stop`.", field="sampling_params.stop", value=request.work.params.stop))  # fmt: skip
            return
        if stopped or len(sequence.tokens) >= request.max_tokens:
            sequence.stop_reason = "stop" if stopped else "length"
            self._leave_cache(sequence)
            self._finish_if_complete(request)

    def _leave_cache(self, sequence: Sample) -> None:
        """Free the sample's room; what it computed can be found again, should the conversation go on."""
        if (table := sequence.table) is None:
            return
        request = sequence.request
        tokens = np.concatenate([request.prompt, np.array(sequence.tokens[:-1], np.int32)])
        keys = prefix_keys(self._whose(request.work), tokens, self.blocks.block_size)
        self.blocks.remember(keys, table.blocks[: len(keys)])
        self.blocks.release(table.blocks)
        sequence.table = None

    # --- ends ---

    def _finish_if_complete(self, request: Request) -> None:
        if any(sequence.stop_reason is None for sequence in request.samples):
            return
        del self._requests[request.work.key]
        self._release_prompt_if_idle(request)
        self._done.append(SampleDone(request.work.key, response=_response(request)))

    def _fail(self, request: Request, error: TinkerError) -> None:
        del self._requests[request.work.key]
        self._drop(request)
        self._done.append(SampleDone(request.work.key, error=error))

    def _drop(self, request: Request) -> None:
        """Take a request out of every queue and free its room."""
        for queue in (self._waiting, self._prefilling):
            if request in queue:
                queue.remove(request)
        for sequence in [sequence for sequence in self._undecided if sequence.request is request]:
            self._undecided.remove(sequence)
        for sequence in request.samples:
            if sequence.table is not None:
                self.blocks.release(sequence.table.blocks)
                sequence.table = None
        self._release_prompt_if_idle(request)
        self._batch = self._batch.replaced([row for row in self._batch.rows if row.request is not request])


def _owner_of(request: Request) -> str:
    return request.work.owner


def _decoder_for(model: Transformer, pool: KvPool, blocks: Blocks) -> Decoder:
    """The pool has one block more than those that are handed out."""
    if model.deterministic:
        from tinsmith.server.engine.gpu.fixed import FixedDecoder

        return FixedDecoder(model, pool)
    if decodes_on_device(model):
        from tinsmith.server.engine.gpu.decoder import DeviceDecoder

        return DeviceDecoder(model, pool, blocks.block_size, spare_block=blocks.num_blocks)
    return PlainDecoder(model, pool)


def decodes_on_device(model: Transformer) -> bool:
    """Whether a whole step is the GPU's: it keeps its adapters around the matrices, in their memory.

    The kernels' tiles are as wide as a head, and tiles are powers of two.
    """
    if not (model.embedding.is_cuda and has_kernels()) or model.deterministic or model.shards is not None:
        return False
    size = model.shape.head_dim
    return size >= 16 and size & (size - 1) == 0


def _prompt_array(prompt: Sequence[int], vocab_size: int) -> npt.NDArray[np.int32]:
    tokens = np.asarray(prompt, np.int64)
    if not tokens.size:
        raise InvalidInputError("The prompt is empty; give at least one token.", field="prompt")
    if not 0 <= tokens.min() <= tokens.max() < vocab_size:
        worst = int(tokens.max() if tokens.max() >= vocab_size else tokens.min())
        raise InvalidInputError(
            f"The prompt holds the token {worst}, and this model knows tokens 0 to {vocab_size - 1}; encode it with "
            "the model's own tokenizer.",
            field="prompt",
            value=worst,
        )
    return tokens.astype(np.int32)


def _refuse_broken(adapter: FrozenAdapter) -> None:
    """Rows of several adapters go through common products, where NaN, or a number near it, would reach all of them."""
    matrices = [matrix for site in adapter.sites.values() for matrix in (site.a, *site.b)]
    largest = torch.stack([matrix.abs().amax().float() for matrix in matrices]).max().item()
    if not largest <= _LARGEST_WEIGHT:
        raise InvalidInputError(
            f"The largest weight of this adapter is {largest:g}, beyond {_LARGEST_WEIGHT:g}: training has diverged. "
            "Sample from an earlier checkpoint, and train on with a lower learning rate.",
            field="model",
            value=largest,
        )


def _not_finite(sequence: Sample) -> InvalidInputError:
    return InvalidInputError(
        f"The model's probabilities for token {len(sequence.tokens)} of sample {sequence.index} are not finite; the "
        "weights are broken, most likely by training with too high a learning rate. Sample from an earlier checkpoint.",
        field="model",
    )


def _response(request: Request) -> SampleResponse:
    scores = request.scores
    return SampleResponse(
        sequences=[_sampled(sequence) for sequence in request.samples],
        prompt_logprobs_np=scores.logprobs,
        topk_prompt_logprobs_np=scores.topk,
        target_prompt_logprobs=scores.targets_result(),
        prompt_cache_hit_tokens=request.num_cache_hits,
        prompt_alt_tokens=scores.alternatives_result(),
    )


def _sampled(sequence: Sample) -> SampledSequence:
    assert sequence.stop_reason is not None
    count = sequence.request.work.topk_sample_logprobs
    return SampledSequence(
        stop_reason=sequence.stop_reason,
        tokens_np=np.array(sequence.tokens, np.int32),
        logprobs_np=np.array(sequence.logprobs, np.float32),
        topk_logprobs_np=TopkLogprobs.from_lists(list(sequence.topk)) if count and sequence.topk else None,
    )
