# Copied from dev/parts/data_llama.py by dev/sync_parts.py: edit it there.
CONTROL = {*range(9), *range(14, 26), *range(28, 32)}  # bytes that no text has


class TextBatches:
    """Random windows of a text in host memory: {"input_ids": [B, S], "labels": [B, S]}."""

    def __init__(self, text: np.ndarray, args: argparse.Namespace, device: torch.device, seed: int):
        self.windows = np.lib.stride_tricks.sliding_window_view(text, args.seq_len)
        self.batch_size = args.batch_size
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)
        self.source: dict = {}  # nothing to report

    def next_batch(self) -> dict[str, Tensor]:
        starts = torch.randint(len(self.windows), (self.batch_size,), generator=self.generator)
        # By NumPy in one thread: PyTorch takes one per core, and on a busy host one is late.
        tokens = torch.from_numpy(self.windows[starts.numpy()]).to(self.device)
        return {"input_ids": tokens, "labels": tokens}


def markov_text(vocab_size: int, length: int, seed: int) -> np.ndarray:
    """Make synthetic text [length] from a fixed order-2 Markov chain.

    The two previous tokens, each taken modulo 8, choose one of 64 contexts; a context has 16
    possible successors with probabilities 1/2, 1/4, 1/8, ..., an entropy of 1.39 nats.
    """
    successors = np.random.default_rng(0).integers(vocab_size, size=(64, 16))  # for every seed
    rng = np.random.default_rng(seed)
    streams = 256  # written side by side, as a chain can only be sampled token after token
    steps = -(-length // streams)
    choices = np.minimum(rng.geometric(0.5, size=(steps, streams)) - 1, 15)
    text = np.empty((steps, streams), dtype=np.int64)
    before, last = rng.integers(vocab_size, size=(2, streams))
    for step in range(steps):
        before, last = last, successors[before % 8 * 8 + last % 8, choices[step]]
        text[step] = last
    return text.T.reshape(-1)[:length]


def read_text(path: Path, seq_len: int) -> np.ndarray:
    """Read the bytes of a text file as tokens [length]."""
    if path.exists() and not path.is_file():  # a pipe can be read only once, /dev/zero has no end
        fail(f"--text-file {path}: {'a folder' if path.is_dir() else 'not a regular file'}")
    try:
        content = path.read_bytes()
    except OSError as error:
        fail(f"--text-file {path}: {error.strerror}")
    if CONTROL & set(content):
        like = "token ids (nanoGPT's train.bin), an archive or UTF-16"
        fail(f"--text-file {path}: it looks like {like}; give plain text (ASCII or UTF-8)")
    if len(content) < seq_len:
        fail(f"--text-file {path}: {len(content)} bytes are fewer than --seq-len {seq_len}")
    return np.frombuffer(content, dtype=np.uint8).astype(np.int64)


def make_batches(args: argparse.Namespace, device: torch.device, seed: int) -> TextBatches:
    """Make the source of training batches: the bytes of --text-file, or synthetic text."""
    if args.text_file:
        text = read_text(args.text_file, args.seq_len)
    else:
        text = markov_text(args.vocab_size, length=max(1_000_000, 4 * args.seq_len), seed=seed)
    return TextBatches(text, args, device, seed)
