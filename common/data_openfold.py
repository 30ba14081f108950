# Copied from common/data_openfold.py by tools/sync_common.py: edit it there.


@dataclass(frozen=True)
class Protein:
    """An alignment with the query in its first row, and the query's structure."""

    tokens: np.ndarray  # [depth, length], uint8
    coords: np.ndarray  # [length, 3], Angstrom: C-beta, or C-alpha of glycine
    observed: np.ndarray  # [length], bool: does the structure have this residue?


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


def read_a3m(path: Path) -> np.ndarray:
    """Read an alignment in A3M format -> tokens [depth, length].

    Insertions, which are in lower case, are dropped.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        fail(f"--msa {path}: {error.strerror}")
    if b"\0" in content or not content.lstrip().startswith((b">", b"#")):
        fail(f"--msa {path}: not an A3M file (it must begin with a line '>name')")
    rows: list[str] = []
    for line in content.decode("utf-8", "replace").splitlines():
        if line.startswith(">"):
            rows.append("")
        elif rows:
            letters = (letter for letter in line.strip() if not letter.islower())
            rows[-1] += "".join(letters).replace(".", "")
    wrong = [i for i, row in enumerate(rows) if len(row) != len(rows[0])]
    if not rows or not rows[0] or wrong:
        columns = len(rows[0]) if rows else 0
        where = "the query"
        if wrong:
            where = f"sequence {wrong[0] + 1} has {len(rows[wrong[0]])} columns, the query"
        fail(f"--msa {path}: {where} has {columns} columns (lower case not counted)")
    code = np.full(128, UNKNOWN, dtype=np.uint8)
    code[[ord(letter) for letter in AMINO_ACIDS]] = np.arange(20)
    code[ord("-")] = GAP
    letters = np.array([[min(ord(letter), 127) for letter in row] for row in rows])
    if not (np.isin(letters, [ord(c) for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ-*"])).all():
        fail(f"--msa {path}: it has characters that are neither amino acids nor gaps")
    return code[letters]


def read_structure(path: Path, query: str) -> tuple[np.ndarray, np.ndarray]:
    """Read the chain of a PDB or mmCIF file that matches the query.

    Returns coordinates [length, 3] and observed [length].
    """
    try:
        import gemmi
    except ImportError:
        fail("--structure needs the package gemmi: pip install gemmi", status=4)
    try:
        structure = gemmi.read_structure(str(path))
    except (OSError, RuntimeError, ValueError) as error:
        fail(f"--structure {path}: not a PDB or mmCIF file ({str(error).splitlines()[0]})")
    structure.setup_entities()
    best, best_identity = None, 0.0
    for chain in structure[0] if len(structure) else ():
        residues = list(chain.get_polymer().first_conformer())
        letters = gemmi.one_letter_code([residue.name for residue in residues]).upper()
        alignment = gemmi.align_string_sequences(list(query), list(letters), [])
        pairs = alignment_pairs(alignment.cigar_str())
        identity = sum(query[i] == letters[j] for i, j in pairs) / max(1, len(pairs))
        if len(pairs) * identity > (len(best) if best else 0) * best_identity:
            best, best_identity = [(i, residues[j]) for i, j in pairs], identity
    if not best or best_identity < 0.9 or len(best) < 0.5 * len(query):
        fail(
            f"--structure {path}: no chain matches the query of the alignment "
            f"(best: {len(best or ())} of {len(query)} residues aligned, "
            f"{100 * best_identity:.0f} % identical; at least half and 90 % are needed)"
        )
    coords = np.zeros((len(query), 3), dtype=np.float32)
    observed = np.zeros(len(query), dtype=bool)
    for i, residue in best:
        atom = residue.find_atom("CB", "*") or residue.find_atom("CA", "*")
        if atom:
            coords[i], observed[i] = atom.pos.tolist(), True
    return coords, observed


def alignment_pairs(cigar: str) -> list[tuple[int, int]]:
    """List the positions (first, second) that a CIGAR string such as 3I70M2D aligns."""
    pairs, first, second = [], 0, 0
    for length, operation in re.findall(r"(\d+)([MID])", cigar):
        if operation == "M":
            pairs += [(first + i, second + i) for i in range(int(length))]
        first += int(length) * (operation in "MI")
        second += int(length) * (operation in "MD")
    return pairs


def read_protein(msa: Path, structure: Path) -> Protein:
    """Read an alignment and the structure of its query."""
    for flag, path in (("--msa", msa), ("--structure", structure)):
        # A pipe can be read only once, /dev/zero has no end.
        if path.exists() and not path.is_file():
            fail(f"{flag} {path}: not a regular file")
    tokens = read_a3m(msa)
    query = "".join((AMINO_ACIDS + "X-")[token] for token in tokens[0])
    return Protein(tokens, *read_structure(structure, query))


def files_of(flag: str, paths: list[Path], *endings: str) -> list[Path]:
    """List these files, and of folders those with one of these endings, by name."""
    files: list[Path] = []
    for path in paths:
        found = sorted(file for file in path.glob("*") if file.name.endswith(endings))
        if path.is_dir() and not found:
            fail(f"{flag} {path}: no file in this folder ends in {' or '.join(endings)}")
        files += found if path.is_dir() else [path]
    return files


def read_proteins(args: argparse.Namespace) -> list[Protein]:
    """Read the proteins of --msa and --structure."""
    alignments = files_of("--msa", args.msa, ".a3m")
    structures = files_of("--structure", args.structure, ".pdb", ".cif", ".pdb.gz", ".cif.gz")
    if len(alignments) != len(structures):
        found = f"{len(alignments)} alignments, --structure {len(structures)} structures"
        fail(f"--msa has {found}: they belong together in this order")
    return [read_protein(*pair) for pair in zip(alignments, structures, strict=True)]


def make_batches(args: argparse.Namespace, device: torch.device, seed: int) -> ProteinBatches:
    """Make the source of training batches.

    They are crops of the proteins of --msa and --structure, or of 64 synthetic ones.
    """
    if args.msa:
        return ProteinBatches(read_proteins(args), args, device, seed)
    proteins = synthetic_proteins(64, args.num_seqs, args.seq_len, seed)
    return ProteinBatches(proteins, args, device, seed)
