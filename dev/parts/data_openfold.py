# Copied from dev/parts/data_openfold.py by dev/sync_parts.py: edit it there.


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
        self, proteins: list[Protein], args: argparse.Namespace, device: torch.device, seed: int
    ):  # fmt: skip
        self.proteins, self.batch_size, self.device = proteins, args.batch_size, device
        self.num_seqs, self.seq_len = crop = args.num_seqs, args.seq_len
        self.padded = any((np.array(p.tokens.shape) < crop).any() for p in proteins)
        self.rng = np.random.default_rng(seed)
        observed = np.concatenate([protein.observed for protein in proteins])
        residues = {"residues": len(observed), "observed": int(observed.sum())}
        self.source = residues if args.msa else {}

    def next_batch(self) -> dict[str, Tensor]:
        chosen = self.rng.integers(len(self.proteins), size=self.batch_size)
        crops = [self._crop(self.proteins[i]) for i in chosen]
        stacked = (torch.from_numpy(np.stack(part)) for part in zip(*crops, strict=True))
        true_tokens, coords, observed, sequences, residues = stacked
        masked = torch.from_numpy(self.rng.random(true_tokens.shape, dtype=np.float32) < 0.15)
        masked &= sequences[:, :, None] & residues[:, None]
        masked[:, 0, 0] = True  # so that there is always something to predict
        batch = {"tokens": torch.where(masked, MASK, true_tokens), "true_tokens": true_tokens}
        batch |= {"masked": masked, "coords": coords, "observed": observed}
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
GEOMETRY = ((91, 4, 52, 6), (123, 8, -170, 15), (110, 20, 0, 180))
KINDS = ("ALEMQK", "VIYFWT", "GPNDSR")
RESIDUES = [[AMINO_ACIDS.index(letter) for letter in kind] for kind in KINDS]
STEP_LENGTH = 3.8  # Angstrom between the C-alpha atoms of successive residues


def synthetic_chains(kinds: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Place residues of these kinds [P, N], each after the last three -> coordinates [P, N, 3]."""
    geometry = np.deg2rad(np.array(GEOMETRY)[kinds]).transpose(2, 0, 1)
    mean, spread = geometry[::2], geometry[1::2]
    angle, torsion = mean + spread * rng.uniform(-1, 1, mean.shape)
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
    """Find for each residue [N] its nearest one, if that is mutual and < 8 Angstrom, or itself."""
    index = np.arange(len(coords))
    distance = np.linalg.norm(coords[:, None] - coords, axis=-1)
    distance[np.abs(index[:, None] - index) < 3] = np.inf  # neighbours in the chain
    nearest = distance.argmin(1)
    return np.where((nearest[nearest] == index) & (distance.min(1) < 8), nearest, index)


def synthetic_proteins(count: int, depth: int, length: int, seed: int) -> list[Protein]:
    """Make proteins with helices, strands and loops; residues that touch mutate together."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(3, size=(count, length))
    stays = rng.random((count, length)) < 0.9  # a stretch has 15 residues on average
    for i in range(1, length):
        kinds[:, i] = np.where(stays[:, i], kinds[:, i - 1], kinds[:, i])
    proteins = []
    for kind, coords in zip(kinds, synthetic_chains(kinds, rng), strict=True):
        shape, choices = (depth, length), len(RESIDUES[0])
        mutation = rng.integers(1, choices, shape) * (rng.random(shape) < 0.3)
        mutation[0] = 0  # a residue that stays what it is
        partner = np.minimum(np.arange(length), contact_partners(coords))
        mutation = mutation[:, partner]  # partners share theirs
        tokens = np.array(RESIDUES)[kind, (rng.integers(choices, size=length) + mutation) % choices]
        tokens[1:][rng.random((depth - 1, length)) < 0.03] = GAP
        observed = np.ones(length, dtype=bool)
        proteins.append(Protein(tokens.astype(np.uint8), coords.astype(np.float32), observed))
    return proteins


def prepared_protein(path: Path) -> Protein:
    """Read a protein that examples/proteins.py has prepared."""
    try:
        with np.load(path, allow_pickle=False) as file:
            tokens, coords, observed = (file[name] for name in ("tokens", "coords", "observed"))
            depth, length = tokens.shape
    except Exception as error:  # damage has many names
        hint = "an alignment needs --structure with it"
        fail(f"--msa {path}: not a .npz that examples/proteins.py prepared ({error}); {hint}")
    whole = tokens.dtype.kind in "iu" and depth and length > 1
    if not whole or tokens.min() < 0 or tokens.max() > GAP or GAP in tokens[0]:
        must = f"whole numbers [depth, length], 0 to {GAP}, and below in the query"
        fail(f"--msa {path}: tokens must be {must}")
    if observed.dtype != bool or observed.shape != (length,) or not observed.any():
        fail(f"--msa {path}: observed must be bool [{length}], not all False")
    if coords.shape != (length, 3) or not np.isfinite(coords[observed]).all():
        fail(f"--msa {path}: coords must be floats [{length}, 3], finite where observed")
    missing = length - int(observed.sum())
    note = f"{path}: {missing} of {length} residues have no coordinates" if missing else ""
    coords = np.where(observed[:, None], coords, 0).astype(np.float32)
    return Protein(tokens.astype(np.uint8), coords, observed, note)


def read_proteins(args: argparse.Namespace) -> list[Protein]:
    """Read the proteins of --msa and --structure, or prepared ones of --msa alone."""
    if not args.structure:
        return [prepared_protein(p) for msa in args.msa for p in sorted(msa.glob("*.npz")) or [msa]]
    try:
        from examples import proteins as reader

        found = reader.read_proteins(args.msa, args.structure)
    except ImportError as error:
        gemmi = "the package gemmi: pip install gemmi"
        needed = gemmi if error.name == "gemmi" else "examples/proteins.py beside this script"
        fail(f"--structure needs {needed}", 4)
    except reader.InputError as error:
        fail(str(error))
    return [Protein(**arrays, note=note) for arrays, note in found]


def make_batches(args: argparse.Namespace, device: torch.device, seed: int) -> ProteinBatches:
    """Make the source of training batches: proteins of --msa, or 64 synthetic ones."""
    if args.msa:
        proteins = read_proteins(args)
    else:
        proteins = synthetic_proteins(64, args.num_seqs, args.seq_len, seed)
    return ProteinBatches(proteins, args, device, seed)
