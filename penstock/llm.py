"""The offline API: an engine in this process.

from penstock import LLM, SamplingParams
outputs = LLM("demo").generate(["import os"], SamplingParams(max_tokens=32))
"""

from __future__ import annotations

import io
import json
import random
import weakref
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, get_type_hints

from penstock.cli.devices import known_device
from penstock.core.clock import SystemClock
from penstock.core.errors import ConfigError, EngineFailure, InvalidRequest, Unavailable, UnsupportedField
from penstock.core.memory import PARTS, Part
from penstock.core.request import MediaKind, Pooling, Request, TokenLogprobs, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.engine.build import EngineOptions, build_engine
from penstock.engine.calibration import calibrated
from penstock.engine.loop import Engine
from penstock.media.limits import MediaLimits
from penstock.media.prompt import MediaPart
from penstock.media.prompt import Prompt as Seen
from penstock.obs.progress import byte_progress
from penstock.service.checkpoint import checked_override, find_checkpoint, read_defaults
from penstock.service.embedding import POOLINGS, check_dimensions, finished, read_embedding
from penstock.service.intake import ModelLimits, check_salt, make_embedding, make_sequences, truncated
from penstock.service.media_parts import media_of
from penstock.text import grammar
from penstock.text.detokenizer import OutputStream, outputs_of
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.media.loader import MediaLoader

Prompt = str | Sequence[int] | Mapping[str, Any]
UNBOUNDED = MediaLimits(count=1 << 16, bytes=1 << 30, pixels=1 << 28)  # of who asks himself


@dataclass(slots=True)
class CompletionOutput:
    """One output of a request.

    Attributes:
        text, token_ids: what was generated, without the prompt.
        logprobs: one per token, when asked for.
        finish_reason: "stop" or "length".
        stop_reason: the stop string or stop token id that ended it, or None.
        cumulative_logprob: of a beam search's result, of all its tokens.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """What a beam search is for: see the fields of the same names of `SamplingParams`.

    Attributes:
        beam_width: how many beams live at a time, and how many results there are; its `n`.
    """

    beam_width: int
    max_tokens: int | None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    structured_outputs: Mapping[str, Any] | None = None

    def sampling(self) -> SamplingParams:
        """Raises InvalidRequest naming the first wrong field."""
        chosen = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "beam_width"}
        return SamplingParams(n=self.beam_width, use_beam_search=True, **chosen)


@dataclass(slots=True)
class BeamSearchSequence:
    """One result of a beam search.

    Attributes:
        tokens, text: the prompt's and the output's, one after the other.
        cum_logprob: of the output's tokens together.
        logprobs: one per token of the output, when asked for.
        finish_reason: "stop" or "length".
        stop_reason: the token of `stop_token_ids` that ended it, or None.
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """What was found for one prompt, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class RequestOutput:
    """What came of one prompt. `text` is its first output's.

    Attributes:
        prompt_token_ids: after truncation.
        prompt_logprobs: one per token of the prompt, when asked for; the first's is None.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text


@dataclass(slots=True)
class EmbeddingOutput:
    """What came of one prompt.

    Attributes:
        prompt_token_ids: after truncation.
        embedding: cut to the `dimensions` that were asked for, and normalised unless it should not be.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float]
    cached_tokens: int = 0


class LLM:
    """A model, ready to generate and to embed.

    Args:
        model: "demo", "demo-vl", a Hugging Face checkpoint folder, or a hub name.
        seed: of the generator that seeds requests which bring no seed; None draws from the system.
        chat_template: Jinja text or a file with it, instead of the checkpoint's.
        pooling: "last" or "mean": which hidden states become an embedding; None takes the checkpoint's.
        override_generation_config: `generation_config.json`'s names of sampling parameters, before those in it.
        allowed_media_domains: hosts from which images and videos may be fetched.
        options: fields of `EngineOptions`: device, dtype, max_model_len, max_num_seqs, ...

    Raises:
        ConfigError: the checkpoint or an option cannot be served.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        seed: int | None = None,
        chat_template: str | None = None,
        pooling: Pooling | None = None,
        override_generation_config: Mapping[str, Any] | None = None,
        allowed_media_domains: Sequence[str] = (),
        **options: Any,
    ) -> None:
        if pooling not in (None, *POOLINGS):
            raise ConfigError(f"pooling: {pooling!r}, allowed is {' or '.join(POOLINGS)}", "pooling")
        directory = find_checkpoint(model)
        self._embedding = read_embedding(directory, pooling)
        self.tokenizer = Tokenizer(directory, chat_template)
        self._defaults = read_defaults(directory, self.tokenizer.eos_id, _override(override_generation_config))
        self._rng = random.Random(seed)
        self._media = _media_loader(directory, allowed_media_domains)
        if self._media is not None:
            weakref.finalize(self, self._media.close)
        with byte_progress("weights") as progress:
            built = build_engine(_engine_options(str(directory), options), SystemClock(), progress=progress)
        self._engine = built.engine
        if built.pool is not None:
            weakref.finalize(self, built.pool.close)
        self._memory, self._asleep = built.memory, 0
        self._given_back: set[Part] = set()
        self.max_model_len = self._engine.scheduler.limits.max_model_len
        self.vocab_size = built.runner.vocab_size
        self.embedding_size = built.runner.embedding_size
        self._generates = built.runner.generates
        scheduler = self._engine.scheduler
        place = built.runner.device
        device = known_device(place) or calibrated(built.trial(), place, built.shape, SystemClock())
        if times := scheduler.measurements.learn(device, built.shape):
            scheduler.predict_by(times)
        self._limits = ModelLimits(
            self.max_model_len,
            self.vocab_size,
            self._defaults.eos_ids,
            scheduler.limits.max_sequences,
            scheduler.kv.kept_blocks(scheduler.pool.num_blocks),
        )
        self._count = 0

    @property
    def engine(self) -> Engine:
        return self._engine

    def default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given none: the checkpoint's own."""
        return SamplingParams(**self._defaults.sampling)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue every prompt; all run together.

        Args:
            prompts: texts, lists of token ids, or {"prompt": text} or {"prompt_token_ids": ids}; or a single one. Such
                an object may have a "cache_salt": only prompts with the same one share cached prefixes; and with a text
                {"multi_modal_data": {"image": ..., "video": ...}}: files' bytes, or Pillow's images, or lists of them,
                for each of which the text has the model's own placeholder.
            params: for all, or one each; None takes the checkpoint's defaults.
            progress: show a progress bar.

        Raises:
            InvalidRequest, PromptTooLong: then nothing was run.
        """
        if not self._generates:
            raise InvalidRequest("model: it was saved without a head to generate with; it can embed", "model")
        listed = _as_list(prompts)
        if isinstance(params, Sequence) and len(params) != len(listed):
            raise InvalidRequest(f"params: {len(params)} for {len(listed)} prompts", "params")
        each = (
            list(params) if isinstance(params, Sequence) else [params or self.default_sampling_params()] * len(listed)
        )
        jobs = [self._job(prompt, p) for prompt, p in zip(listed, each, strict=True)]
        self._run(jobs, progress)
        return [job.output for job in jobs]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        progress: bool = False,
    ) -> list[EmbeddingOutput]:
        """Embed every prompt; all run together.

        Args:
            prompts: as for `generate`.
            dimensions: numbers that are wanted, the first ones; None is all.
            normalize: whether embeddings have length 1; None is as the checkpoint says.
            truncate_prompt_tokens: see `SamplingParams`.

        Raises:
            InvalidRequest, PromptTooLong: then nothing was run.
        """
        check_dimensions(dimensions, self.embedding_size)
        params = SamplingParams(truncate_prompt_tokens=truncate_prompt_tokens)
        jobs = [self._embedding_job(prompt, params) for prompt in _as_list(prompts)]
        self._run(jobs, progress)
        normal = self._embedding.normalize if normalize is None else normalize
        for job in jobs:
            job.output.embedding = finished(job.output.embedding, dimensions, normal)
        return [job.output for job in jobs]

    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Give the memory back until `wake_up`. What was cached is forgotten.

        Args:
            level: 1 keeps the weights in the host's memory, 2 forgets them too.
        """
        if level not in (1, 2):
            raise InvalidRequest(f"level: {level!r}, allowed are 1, 2", "level")
        while not self._engine.at_rest:
            self._engine.step()  # what an interrupt has left
        self._asleep = max(level, self._asleep)
        self._given_back.update(PARTS)
        self._memory.sleep(self._asleep, self._engine.clear_cache())

    def wake_up(self, tags: Part | Sequence[Part] | None = None) -> None:
        """Take the memory up again. Tokens are the same as before.

        Args:
            tags: parts of it, "weights" and "kv_cache", or a single one; None is all.

        Raises:
            ConfigError: the checkpoint is not what it was, or cannot be read, or there is no room.
        """
        asked: Sequence[str] = [tags] if isinstance(tags, str) else tags or PARTS
        for tag in asked:
            if tag not in PARTS:
                raise InvalidRequest(f"tags: {tag!r}, allowed are {', '.join(PARTS)}", "tags")
        parts = [part for part in PARTS if part in asked and part in self._given_back]
        self._memory.wake_up(parts)
        self._given_back.difference_update(parts)
        if parts and not self._given_back:
            self._asleep = 0
            self._engine.expect()

    def _embedding_job(self, prompt: Prompt, params: SamplingParams) -> _EmbeddingJob:
        text, seen, salt = self._read(prompt)
        if seen.media:
            raise UnsupportedField("prompt: images are not embedded, allowed is text", "prompt")
        tokens = list(truncated(seen.tokens, params, self.max_model_len, generates=False))
        self._count += 1
        name, pooling = f"offline-{self._count}", self._embedding.pooling
        sequence = make_embedding(name, tokens, params, pooling, self._limits, cache_salt=salt)
        return _EmbeddingJob([sequence], EmbeddingOutput(text, tokens, []))

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, progress: bool = False
    ) -> list[BeamSearchOutput]:
        """Search for the continuations of every prompt that are the likeliest as a whole; all prompts run together.

        Args:
            prompts: as for `generate`.

        Raises:
            InvalidRequest, PromptTooLong: then nothing was run.
        """
        found = self.generate(prompts, params.sampling(), progress=progress)
        return [BeamSearchOutput([self._searched(one, output) for one in output.outputs]) for output in found]

    def _searched(self, one: CompletionOutput, of: RequestOutput) -> BeamSearchSequence:
        return BeamSearchSequence(
            of.prompt_token_ids + one.token_ids,
            self.tokenizer.decode(of.prompt_token_ids) + one.text,
            cast(float, one.cumulative_logprob),
            one.logprobs,
            one.finish_reason,
            one.stop_reason,
        )

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. Without `params`, answers may be as long as the model allows.

        Args:
            messages: as the API has them, with images and videos; {"type": "image_pil", "image_pil": ...} is one of
                Pillow's.
        """
        talks: Any = messages if messages and not isinstance(messages[0], dict) else [messages]
        chosen = params or SamplingParams(**{"max_tokens": None, **self._defaults.sampling})
        return self.generate([{"seen": self._talk(list(talk), template)} for talk in talks], chosen)

    def _talk(self, talk: list[dict[str, Any]], template: Mapping[str, Any]) -> Seen:
        named, parts = talk, list[MediaPart]()
        if all(isinstance(each, dict) for each in talk):  # else its tokenizer says what is wrong
            named, parts = media_of([{**each, "content": _with_urls(each.get("content"))} for each in talk])
        made = self._loader(parts).load_here(parts) if parts else ()
        tokens = self.tokenizer.encode_chat(named, **template)
        return Seen(tokens) if self._media is None else self._media.placed(tokens, made, self.max_model_len)

    def _loader(self, parts: Sequence[MediaPart]) -> MediaLoader:
        for part in parts:
            if self._media is None or self._media.processor.token_of(part.kind) is None:
                raise UnsupportedField(f"{part.field}: this model takes no {part.kind}s", part.field)
        assert self._media is not None
        return self._media

    def _read(self, prompt: Prompt) -> tuple[str | None, Seen, str]:
        """(its text, if it is one, what it is made of, its cache salt)"""
        if isinstance(prompt, Mapping) and isinstance(seen := prompt.get("seen"), Seen):
            return None, seen, ""
        salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        if salt is not None:
            check_salt(salt)
        plain = _plain(prompt)
        text = plain if isinstance(plain, str) else None
        tokens = self.tokenizer.encode(plain) if isinstance(plain, str) else plain
        if not (parts := _parts_of(prompt)):
            return text, Seen(tokens), salt or ""
        loader = self._loader(parts)
        return text, loader.placed(tokens, loader.load_here(parts), self.max_model_len, "prompt"), salt or ""

    def _job(self, prompt: Prompt, params: SamplingParams) -> _Job:
        text, seen, salt = self._read(prompt)
        if seen.media and params.truncate_prompt_tokens is not None:
            field = "truncate_prompt_tokens"
            raise InvalidRequest(f"{field}: {params.truncate_prompt_tokens}, allowed only without images", field)
        tokens = list(truncated(seen.tokens, params, self.max_model_len))
        self._count += 1
        name = f"offline-{self._count}"
        streams = [OutputStream(i, self.tokenizer, params) for i in range(params.n)]
        outputs = [CompletionOutput(i, logprobs=None if params.logprobs is None else []) for i in range(params.n)]
        bad_words = self.tokenizer.encode_bad_words(params.bad_words)
        if params.structured_outputs is not None:
            grammar.check(params.structured_outputs)
        sequences = make_sequences(name, tokens, params, self._limits, self._rng, bad_words=bad_words, cache_salt=salt)
        sequences = [replace(sequence, media=seen.media, pixels=seen.pixels) for sequence in sequences]
        return _Job(
            {s.id: i for i, s in enumerate(sequences)}, sequences, streams, RequestOutput(text, tokens, outputs)
        )

    def _run(self, jobs: Sequence[_Job | _EmbeddingJob], progress: bool) -> None:
        if self._given_back:
            raise Unavailable("the engine sleeps, wake it up first")
        owner: dict[str, _Job | _EmbeddingJob] = {s.id: job for job in jobs for s in job.sequences}
        try:
            for job in jobs:
                for sequence in job.sequences:
                    self._engine.add(sequence)
            for _ in _track(self._steps(owner), len(owner), progress):
                pass
        finally:  # an interrupt leaves nothing behind
            self._engine.cancel(owner)

    def _steps(self, owner: dict[str, _Job | _EmbeddingJob]) -> Iterator[int]:
        """Run until nothing is left; yields how many sequences ended in each step."""
        while self._engine.has_work:
            ended = 0
            for output in self._engine.step()[0]:
                job = owner[output.request_id]
                if job.receive(output):
                    ended += 1
                    self._engine.cancel([output.request_id])
            yield ended


@dataclass(slots=True)
class _Job:
    """A prompt on its way.

    Attributes:
        index: sequence id -> which output it is.
    """

    index: dict[str, int]
    sequences: list[Any]
    streams: list[OutputStream]
    output: RequestOutput

    def receive(self, output: TokenOutput) -> bool:
        """What a step brought one of its sequences. Returns whether that has ended."""
        self.output.cached_tokens = max(self.output.cached_tokens, output.cached_tokens)
        ended = False
        if output.hypotheses is not None:
            del self.output.outputs[len(output.hypotheses) :]  # no more may follow
        for index, own in outputs_of(self.index[output.request_id], output):
            delta, result = self.streams[index].feed(own), self.output.outputs[index]
            if delta.prompt_logprobs is not None:
                self.output.prompt_logprobs = [None, *delta.prompt_logprobs]
            result.text += delta.text
            result.token_ids += delta.tokens
            if result.logprobs is not None:
                result.logprobs += delta.logprobs or []
            result.finish_reason, result.stop_reason = delta.finish_reason, delta.stop_reason
            if output.hypotheses is not None:
                result.cumulative_logprob = output.hypotheses[index].cumulative_logprob
            ended = delta.finish_reason is not None
        return ended


@dataclass(slots=True)
class _EmbeddingJob:
    """A prompt on its way."""

    sequences: list[Request]
    output: EmbeddingOutput

    def receive(self, output: TokenOutput) -> bool:
        """See `_Job`."""
        if output.embedding is None:
            raise EngineFailure("the model computed something that is no number")
        self.output.embedding, self.output.cached_tokens = output.embedding, output.cached_tokens
        return True


def _media_loader(directory: Path, domains: Sequence[str]) -> MediaLoader | None:
    """None where the model sees nothing, for which the packages are not needed."""
    if "vision_config" not in (directory / "config.json").read_text(encoding="utf-8"):
        return None
    from penstock.media.loader import MediaLoader
    from penstock.media.processor import read_processor

    processor = read_processor(directory)
    return None if processor is None else MediaLoader(processor, replace(UNBOUNDED, domains=tuple(domains)))


def _override(given: Mapping[str, Any] | None) -> str | None:
    name = "override_generation_config"
    try:
        return None if given is None else checked_override(json.dumps(given))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{name}: {given!r}, allowed is {error}", name) from None


def _engine_options(model: str, options: dict[str, Any]) -> EngineOptions:
    kinds = get_type_hints(EngineOptions)
    del kinds["model"]
    for name in options:
        if name not in kinds:
            raise ConfigError(f"{name}: no such option; allowed are {', '.join(kinds)}", name)
    return EngineOptions(model=model, **{name: _of_kind(name, x, kinds[name]) for name, x in options.items()})


def _of_kind(name: str, value: Any, kind: Any) -> Any:
    """Numbers may be NumPy's, a device torch's. Raises ConfigError."""
    kinds = get_args(kind) or (kind,)
    if isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)):
        return value
    if not isinstance(value, bool):
        if name == "speculative_config" and isinstance(value, Mapping):
            return json.dumps(dict(value))
        if int in kinds and isinstance(value, Integral):
            return int(value)
        if float in kinds and isinstance(value, Real):
            return float(value)
        if name == "device" and type(value).__module__ == "torch":
            return str(value)
    raise ConfigError(f"{name}: {value!r}, allowed is {getattr(kind, '__name__', kind)}", name)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed: list[Any] = list(prompts)
    return [listed] if listed and isinstance(listed[0], Integral) else listed


def _plain(prompt: Any) -> str | list[int]:
    """Text or token ids. Raises InvalidRequest on anything else."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(prompt, str):
        return prompt
    tokens = list(prompt) if isinstance(prompt, Iterable) else [prompt]
    for token in tokens:
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise InvalidRequest(f"prompt: {token!r}, allowed is a text or a list of token ids", "prompt")
    return [int(token) for token in tokens]


def _parts_of(prompt: Any) -> list[MediaPart]:
    """What a prompt brings beside its text, all images before all videos. Raises InvalidRequest."""
    name = "multi_modal_data"
    given = prompt.get(name) if isinstance(prompt, Mapping) else None
    if not given:
        return []
    if not isinstance(given, Mapping) or given.keys() - {"image", "video"}:
        raise InvalidRequest(f"{name}: allowed is an object with 'image' and 'video'", name)
    kinds: tuple[MediaKind, ...] = ("image", "video")
    parts = []
    for kind in kinds:
        listed = given.get(kind)
        each = [] if listed is None else list(listed) if isinstance(listed, list | tuple) else [listed]
        parts += [MediaPart(kind, "", f"{name}.{kind}", _file(one, f"{name}.{kind}")) for one in each]
    return parts


def _file(given: Any, field: str) -> bytes:
    if isinstance(given, bytes | bytearray):
        return bytes(given)
    if not hasattr(given, "save"):
        raise InvalidRequest(f"{field}: {type(given).__name__}, allowed are a file's bytes and Pillow's images", field)
    file = io.BytesIO()
    given.convert("RGB").save(file, "PNG")
    return file.getvalue()


def _with_urls(content: Any) -> Any:
    """A message's content, with Pillow's images as data: URLs."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "image_url", "image_url": {"url": _data_url(part.get("image_pil"))}}
        if isinstance(part, Mapping) and part.get("type") == "image_pil"
        else part
        for part in content
    ]


def _data_url(image: Any) -> str:
    return f"data:image/png;base64,{b64encode(_file(image, 'image_pil')).decode()}"


def _track(steps: Iterator[int], total: int, progress: bool) -> Iterator[int]:
    if not progress:
        yield from steps
        return
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        task = bar.add_task("generating", total=total)
        for ended in steps:
            bar.advance(task, ended)
            yield ended
