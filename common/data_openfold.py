# Copied from common/data_openfold.py by tools/sync_common.py: edit it there.


@dataclass(frozen=True)
class Protein:
    """An alignment with the query in its first row, and the query's structure."""

    tokens: np.ndarray  # [depth, length], uint8
    coords: np.ndarray  # [length, 3], Angstrom: C-beta, or C-alpha of glycine
    observed: np.ndarray  # [length], bool: does the structure have this residue?
    note: str = ""  # what of the files did not match


class ProteinBatches:
    """Crop proteins at random, from host memory, and mask 15 % of the alignment.

    A batch has tokens, true_tokens and masked [B, S, N], coords [B, N, 3] and observed [B, N]. If
    any protein is smaller than a crop, it is padded, and batches have sequences [B, S] and residues
    [B, N], which are False for padding.
    """

    def __init__(
        self,
        proteins: list[Protein],
        args: argparse.Namespace,
        device: torch.device,
        seed: int,
    ):
        self.proteins, self.device = proteins, device
        self.batch_size, self.num_seqs, self.seq_len = args.batch_size, args.num_seqs, args.seq_len
        crop = (args.num_seqs, args.seq_len)
        self.padded = any((np.array(p.tokens.shape) < crop).any() for p in proteins)
        self.rng = np.random.default_rng(seed)
        self.source = {}
        if args.msa:
            observed = np.concatenate([protein.observed for protein in proteins])
            self.source = {"residues": len(observed), "observed": int(observed.sum())}

    def next_batch(self) -> dict[str, Tensor]:
        chosen = self.rng.integers(len(self.proteins), size=self.batch_size)
        crops = [self._crop(self.proteins[i]) for i in chosen]
        stacked = (torch.from_numpy(np.stack(part)) for part in zip(*crops, strict=True))
        true_tokens, coords, observed, sequences, residues = stacked
        masked = torch.from_numpy(self.rng.random(true_tokens.shape, dtype=np.float32) < 0.15)
        masked &= sequences[:, :, None] & residues[:, None]
        masked[:, 0, 0] = True  # so that there is always something to predict
        batch = {
            "tokens": torch.where(masked, MASK, true_tokens),
            "true_tokens": true_tokens,
            "masked": masked,
            "coords": coords,
            "observed": observed,
        }
        if self.padded:
            batch |= {"sequences": sequences, "residues": residues}
        return {name: value.to(self.device) for name, value in batch.items()}

    def _crop(self, protein: Protein) -> tuple[np.ndarray, ...]:
        depth, length = protein.tokens.shape
        others = 1 + self.rng.permutation(depth - 1)[: self.num_seqs - 1]
        start = self.rng.integers(max(0, length - self.seq_len) + 1)
        window = slice(start, start + self.seq_len)
        tokens = protein.tokens[np.concatenate(([0], others)), window].astype(np.int64)
        depth, length = tokens.shape
        right = (0, self.seq_len - length)
        return (
            np.pad(tokens, ((0, self.num_seqs - depth), right), constant_values=GAP),
            np.pad(protein.coords[window], (right, (0, 0))),
            np.pad(protein.observed[window], right),
            np.arange(self.num_seqs) < depth,
            np.arange(self.seq_len) < length,
        )


# Synthetic proteins: what kind of local structure a residue is in, helix, strand or loop, decides
# its geometry and its possible amino acids. Of each: virtual bond angle and torsion between
# successive residues in degrees, each with its spread.
GEOMETRY = np.array([[91, 4, 52, 6], [123, 8, -170, 15], [110, 20, 0, 180]])
KINDS = ("ALEMQK", "VIYFWT", "GPNDSR")
RESIDUES = np.array([[AMINO_ACIDS.index(letter) for letter in kind] for kind in KINDS])
STEP_LENGTH = 3.8  # Angstrom between the C-alpha atoms of successive residues


def synthetic_chains(kinds: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Build chains of residues of the given kinds [P, N] -> coordinates [P, N, 3].

    Each residue is placed after the last three.
    """
    geometry = np.deg2rad(GEOMETRY[kinds]).transpose(2, 0, 1)
    angle_mean, angle_spread, torsion_mean, torsion_spread = geometry
    angle = angle_mean + angle_spread * rng.uniform(-1, 1, kinds.shape)
    torsion = torsion_mean + torsion_spread * rng.uniform(-1, 1, kinds.shape)
    coords = np.zeros((*kinds.shape, 3))
    # The last two steps, of unit length.
    before, last = np.array([[0.0, 1, 0], [1, 0, 0]])[:, None].repeat(len(kinds), 1)
    for i in range(1, kinds.shape[1]):
        normal = np.cross(before, last)
        normal /= np.linalg.norm(normal, axis=-1, keepdims=True)
        bend, turn = angle[:, i, None], torsion[:, i, None]
        sideways = np.cos(turn) * np.cross(normal, last) + np.sin(turn) * normal
        before, last = last, -np.cos(bend) * last + np.sin(bend) * sideways
        coords[:, i] = coords[:, i - 1] + STEP_LENGTH * last
    return coords


def contact_partners(coords: np.ndarray) -> np.ndarray:
    """Find for each residue [N] the one it touches, or itself.

    Two that touch are nearest to each other, under 8 Angstrom, and 3 or more apart in the chain.
    """
    index = np.arange(len(coords))
    distance = np.linalg.norm(coords[:, None] - coords, axis=-1)
    distance[np.abs(index[:, None] - index) < 3] = np.inf
    nearest = distance.argmin(1)
    return np.where((nearest[nearest] == index) & (distance.min(1) < 8), nearest, index)


def synthetic_proteins(count: int, depth: int, length: int, seed: int) -> list[Protein]:
    """Make proteins with helices, strands and loops.

    In their families residues that touch mutate together.
    """
    rng = np.random.default_rng(seed)
    kinds = rng.integers(3, size=(count, length))
    # So that a stretch of one kind is 15 residues long on average.
    stays = rng.random((count, length)) < 0.9
    for i in range(1, length):
        kinds[:, i] = np.where(stays[:, i], kinds[:, i - 1], kinds[:, i])
    proteins = []
    for kind, coords in zip(kinds, synthetic_chains(kinds, rng), strict=True):
        partner = contact_partners(coords)
        shape = (depth, length)
        choices = RESIDUES.shape[1]
        # 0: the residue stays what it is.
        mutation = rng.integers(1, choices, shape) * (rng.random(shape) < 0.3)
        mutation = mutation[:, np.minimum(np.arange(length), partner)]  # partners share theirs
        mutation[0] = 0
        tokens = RESIDUES[kind, (rng.integers(choices, size=length) + mutation) % choices]
        tokens[1:][rng.random((depth - 1, length)) < 0.03] = GAP
        observed = np.ones(length, dtype=bool)
        proteins.append(Protein(tokens.astype(np.uint8), coords.astype(np.float32), observed))
    return proteins


def prepared_protein(path: Path) -> Protein:
    """Read a protein that examples/proteins.py has prepared."""
    if path.exists() and not path.is_file():
        fail(f"--msa {path}: not a regular file")
    try:
        with np.load(path, allow_pickle=False) as file:
            tokens, coords, observed = (file[name] for name in ("tokens", "coords", "observed"))
    except FileNotFoundError as error:
        fail(f"--msa {path}: {error.strerror}")
    except Exception:  # damage has many names
        hint = "an alignment needs --structure with it"
        fail(f"--msa {path}: not a .npz that examples/proteins.py prepared; {hint}")
    length = tokens.shape[-1] if tokens.ndim == 2 else 0
    if tokens.dtype.kind not in "iu" or not len(tokens) or length < 2:
        fail(f"--msa {path}: tokens must be whole numbers [depth, length]")
    if not ((tokens >= 0) & (tokens <= GAP)).all() or (tokens[0] == GAP).any():
        fail(f"--msa {path}: tokens must be 0 to {GAP}, and below in the query")
    if observed.dtype != bool or observed.shape != (length,) or not observed.any():
        fail(f"--msa {path}: observed must be bool [{length}], not all False")
    if coords.dtype.kind != "f" or coords.shape != (length, 3):
        fail(f"--msa {path}: coords must be floats [{length}, 3]")
    if not np.isfinite(coords[observed]).all():
        fail(f"--msa {path}: coords of observed residues must be finite")
    missing = length - int(observed.sum())
    note = f"{path}: {missing} of {length} residues have no coordinates" if missing else ""
    coords = np.where(observed[:, None], coords, 0).astype(np.float32)
    return Protein(tokens.astype(np.uint8), coords, observed, note)


def read_proteins(args: argparse.Namespace) -> list[Protein]:
    """Read the proteins of --msa and --structure, or prepared ones of --msa alone."""
    if not args.structure:
        found = [sorted(p.glob("*.npz")) or [p] for p in args.msa]
        return [prepared_protein(path) for path in itertools.chain(*found)]
    reader = beside("examples.proteins", "--structure")
    try:
        found = reader.read_proteins(args.msa, args.structure)
    except reader.InputError as error:
        fail(str(error))
    return [Protein(**arrays, note=note) for arrays, note in found]


def make_batches(args: argparse.Namespace, device: torch.device, seed: int) -> ProteinBatches:
    """Make the source of training batches.

    They are crops of the proteins of --msa and --structure, or of 64 synthetic ones.
    """
    if args.msa:
        return ProteinBatches(read_proteins(args), args, device, seed)
    proteins = synthetic_proteins(64, args.num_seqs, args.seq_len, seed)
    return ProteinBatches(proteins, args, device, seed)
