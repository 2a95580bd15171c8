"""Tokenizers: loading without executing code of the model repository, and work on untrusted text.

`TextWorkers` are processes that are killed when the work on a text takes too long or too much memory. Tokenizers, chat
templates, grammar compilers and regular expressions hold the interpreter's lock, and their cost depends on the text: a
thread cannot stop them, and an event loop that runs them serves no other client.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from typing import Any, TypeVar

from verl.utils.exceptions import PicklableError
from verl.utils.fs import expand_path
from verl.utils.process_pool import LOW_PRIORITY, ProcessDied, ProcessPool, TaskTimeout

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def hf_tokenizer(name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Return the model's tokenizer; a missing padding token is set to the end token.

    `trust_remote_code` defaults to False: True runs Python code from the model's repository.
    """
    from transformers import AutoTokenizer

    kwargs.setdefault("trust_remote_code", False)
    path = expand_path(name_or_path)
    if _lacks_tokenizer(path):  # transformers would return a tokenizer that knows special tokens only
        raise ValueError(
            f"{path}: the folder has no tokenizer ({', '.join(_TOKENIZER_FILES)}). Copy the files of the model's "
            "tokenizer into it."
        )
    tokenizer = AutoTokenizer.from_pretrained(path, **kwargs)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"{os.fspath(name_or_path)}: the tokenizer has neither a padding nor an end token. "
                "Pass pad_token='…' or add one to its tokenizer_config.json."
            )
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("%s: no padding token; using the end token %r", name_or_path, tokenizer.eos_token)
    return tokenizer


def tokenizer_if_any(name_or_path: str | os.PathLike[str], trust_remote_code: bool = False) -> Any | None:
    """Return the tokenizer without setting a padding token, or None for a local folder without tokenizer files."""
    from transformers import AutoTokenizer

    path = expand_path(name_or_path)
    if _lacks_tokenizer(path):
        return None
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def _lacks_tokenizer(path: str) -> bool:
    return os.path.isdir(path) and not any(os.path.isfile(os.path.join(path, name)) for name in _TOKENIZER_FILES)


def hf_processor(name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any | None:
    """Return the model's processor (text with images, audio or video), or None if it has none."""
    path = expand_path(name_or_path)
    if not any(_has_file(path, name) for name in _PROCESSOR_FILES):
        return None
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    kwargs.setdefault("trust_remote_code", False)
    processor = AutoProcessor.from_pretrained(path, **kwargs)
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


def _has_file(path: str, name: str) -> bool:
    if os.path.isdir(path):
        return os.path.isfile(os.path.join(path, name))
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        hf_hub_download(path, name)
    except EntryNotFoundError:  # not in the repository; offline: not in the local cache
        return False
    return True


# ---------------------------------------------------------------- untrusted text

SHORT_TEXT = 16 * 1024
"""Texts of up to this many characters are tokenised and rendered in the calling process: that takes a few milliseconds,
less than a call of another process on a busy machine."""
MEMORY_LIMIT = 2 * 2**30
"""Bytes that one task may allocate."""
_PROCESSES = 4
# Maximum number of processes that run heavy tasks, and of heavy tasks that wait for such a process.
_MAX_HEAVY = 2
MAX_WAITING = 64
# A process is replaced if its memory has grown by more than this many bytes after a task.
_MAX_GROWTH = 8 * 2**20

# Set in worker processes only.
_tokenizer: Any = None


class TextWorkLimit(PicklableError, ValueError):
    """The work was stopped at its time or memory limit, or ended its process. The message names the cause."""


class TextWorkersBusy(PicklableError):
    """Too many expensive tasks wait already, or processes were killed from outside. The caller may try again later."""


class TextWorkers:
    """Processes that run functions with one tokenizer. They start with `start`, or with the first call.

    At most half of the processes run tasks that are declared heavy (client templates, grammars, long texts): these
    delay each other and never the light ones. At most 64 heavy tasks wait.
    """

    def __init__(
        self,
        load_tokenizer: Callable[[], Any],
        seconds: float,
        memory: int = MEMORY_LIMIT,
        functions: Sequence[Callable[..., Any]] = (),
    ) -> None:
        """A task may take `seconds` and `memory` bytes beyond what the processes need for the tokenizer.

        The modules of `functions` are imported before the processes fork, so that they share the memory.
        """
        self.seconds, self._memory = seconds, memory
        initializer = partial(_load, load_tokenizer, functions)
        self.pool = ProcessPool(
            _PROCESSES, initializer=initializer, memory_limit=memory, max_growth=_MAX_GROWTH, prefork=True
        )
        self._start_lock = threading.Lock()
        self.started = False
        self._heavy_slots = asyncio.Semaphore(_MAX_HEAVY)
        self._num_waiting = 0

    def start(self) -> None:
        """Start the processes and wait until the tokenizer is loaded. Raises the error that prevents it."""
        with self._start_lock:
            if not self.started:
                self.pool.submit(_run, _do_nothing, ()).result()  # raises errors of `_load`
                self.started = True

    async def call(self, function: Callable[..., T], *arguments: Any, heavy: bool = False) -> T:
        """Return `function(tokenizer, *arguments)`, or raise its exception, TextWorkLimit or TextWorkersBusy.

        The function and its arguments are pickled. If the caller is cancelled, the work continues up to its limits.
        """
        if not self.started:
            await asyncio.to_thread(self.start)
        if not heavy:
            return await self._result(self._submit(function, arguments))
        if self._num_waiting >= MAX_WAITING:
            raise TextWorkersBusy(f"{self._num_waiting} long texts, templates or grammars are waiting already")
        self._num_waiting += 1
        try:
            await self._heavy_slots.acquire()
        finally:
            self._num_waiting -= 1
        try:
            future = self._submit(function, arguments)
        except BaseException:
            self._heavy_slots.release()
            raise
        loop = asyncio.get_running_loop()
        # Released when the work ends: the caller may be cancelled earlier.
        future.add_done_callback(lambda _: _release(loop, self._heavy_slots))
        return await self._result(future)

    def close(self) -> None:
        """End the processes. Calls in progress raise PoolClosed."""
        self.pool.close()

    def _submit(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Future[Any]:
        return self.pool.submit(_run, function, arguments, timeout=self.seconds)

    async def _result(self, future: Future[Any]) -> Any:
        try:
            return await asyncio.wrap_future(future)
        except TaskTimeout as error:
            raise TextWorkLimit(f"processing the request takes longer than {self.seconds:g} s. Shorten it.") from error
        except MemoryError as error:
            limit = f"{self._memory / 2**30:.3g} GB of memory"
            raise TextWorkLimit(f"processing the request takes more than {limit}. Shorten it.") from error
        except ProcessDied as error:
            reason = f"the request could not be processed: its process {error.process_end}"
            if error.external:
                raise TextWorkersBusy(reason) from error
            raise TextWorkLimit(f"{reason}. Shorten it, or try again.") from error


def tokenizer_loader(tokenizer: Any) -> Callable[[], Any]:
    """Return a function that provides the tokenizer in another process: pickled, or reloaded if it is remote code.

    Remote code is only executed there if this process was already allowed to execute it.
    """
    is_remote_code = type(tokenizer).__module__.startswith("transformers_modules")
    if is_remote_code:
        return partial(hf_tokenizer, tokenizer.name_or_path, trust_remote_code=is_remote_code)
    return partial(_identity, tokenizer)


@lru_cache(8)
def longest_token(tokenizer: Any) -> int:
    """The length of the longest token in characters: a text of more than n × this length has more than n tokens.

    Exceptions are texts that the tokenizer's normaliser shortens, such as runs of white space that it collapses.
    """
    return max(map(len, tokenizer.get_vocab()))


def max_characters(tokenizer: Any, tokens: int) -> int:
    """The largest number of characters of a text with at most `tokens` tokens. Exceptions: see `longest_token`."""
    return max(1, tokens) * longest_token(tokenizer)


def text_length(value: Any) -> int:
    """The size of a nested value: the characters of all strings and keys, plus one for every value."""
    total, remaining = 0, [value]
    while remaining:
        item = remaining.pop()
        total += 1
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            total += sum(len(key) for key in item if isinstance(key, str))
            remaining.extend(item.values())
        elif isinstance(item, list | tuple):
            remaining.extend(item)
    return total


def _identity(tokenizer: Any) -> Any:
    return tokenizer


def _release(loop: asyncio.AbstractEventLoop, semaphore: asyncio.Semaphore) -> None:
    """Release a semaphore of an event loop from another thread."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(semaphore.release)


def _load(load_tokenizer: Callable[[], Any], _functions: Sequence[Callable[..., Any]]) -> None:
    """Initialize a worker process. Unpickling `_functions` has imported their modules."""
    global _tokenizer
    os.nice(LOW_PRIORITY)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the process forks, and a fork has none of its parent's threads
    _tokenizer = load_tokenizer()


def _do_nothing(_tokenizer: Any) -> None:
    pass


def _run(function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    """Run a task in a worker process."""
    return function(_tokenizer, *arguments)
