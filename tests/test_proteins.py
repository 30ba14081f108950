"""Alignments and structures as their producers write them: what is read, and what is refused and
why."""

import gzip
import re
from pathlib import Path

import gemmi
import numpy as np
import pytest
import torch
from conftest import ROOT, assert_one_error, batches, finished, run_main, words

from fusion_lab.script import import_file

proteins = import_file(ROOT / "examples" / "proteins.py", "proteins")
QUERY, ROW = "MKVLAGSTWYDEHRNQKLIVFA", "MKVLAGSTWYDEHRNQKLIVF-"
A3M = f">q text\n{QUERY}\n>h1\n{ROW}\n"

# Alignments


def alignment(content: str | bytes, folder: Path) -> list[str]:
    """Rows of an alignment with this content."""
    path = folder / "file"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    tokens = proteins.read_alignment(proteins.read_text(path))
    return ["".join((proteins.AMINO_ACIDS + "X-")[token] for token in row) for row in tokens]


STOCKHOLM = f"""# STOCKHOLM 1.0
#=GF ID q

q         {QUERY[:10]}..{QUERY[10:15]}
#=GR q PP 9999999999..99999
h1        {ROW[:10]}gg{ROW[10:15]}
#=GC RF   xxxxxxxxxx..xxxxx

q         {QUERY[15:]}
h1        {ROW[15:]}
//
"""


@pytest.mark.parametrize(
    "content",
    [
        A3M,
        f">q\n{QUERY}\n\0>q\n{QUERY}\n>h1\n{ROW}\n\0",  # two databases of the server
        "\ufeff" + A3M,
        A3M.replace("\n", "\r\n"),
        gzip.compress(A3M.encode(), mtime=0),
        "#22\t1\n" + A3M,
        A3M.replace(QUERY, QUERY[:9] + "\n" + QUERY[9:] + " "),
        A3M.replace(QUERY, QUERY + "*").replace(ROW, ROW + "-"),
        A3M.replace(ROW, ROW[:5] + "acd" + ROW[5:]),
        f">q\n{QUERY[:5]}...{QUERY[5:]}\n>h1\n{ROW[:5]}acd{ROW[5:]}\n",  # A2M
        f">q\n{QUERY[:5]}--{QUERY[5:]}\n>h1\n{ROW[:5]}AC{ROW[5:]}\n",  # aligned FASTA
        f">ss_dssp\n{'C' * 22}\n>ss_conf\n{'9' * 22}\n{A3M}>aa_pred\n{QUERY}\n>sa_dssp x\nAB\n",
        f">q_consensus\n{QUERY[::-1]}\n{A3M}>h_consensus x\n{QUERY}\n",
        STOCKHOLM,
    ],
    ids=words(
        "plain blocks bom crlf gzip colabfold wrapped stop-column insertion a2m fasta annotation "
        "consensus stockholm"
    ),
)
def test_alignment_is_read_as_its_producer_meant_it(content: str | bytes, tmp_path: Path):
    assert alignment(content, tmp_path) == [QUERY, ROW]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "empty"),
        (A3M.encode("utf-16-le"), "UTF-16"),
        (gzip.compress(A3M.encode(), mtime=0)[:-9], "damaged gzip"),
        (">q\n>h1\n", r"sequence 1 \(q\), the query, has fewer than 2 residues"),
        (A3M.replace(ROW, ROW[:-2]), r"sequence 2 \(h1\) has 20 columns, the query 22"),
        (f">q\n{QUERY}\n>h1\nACDEF\n", "are these sequences aligned"),
        (A3M.replace("-", "1"), r"sequence 2 \(h1\): '1' in position 22"),
        (A3M.replace(ROW, "MK*" + ROW[3:]), r"sequence 2 \(h1\): '\*' in position 3"),
        (A3M.replace("MKVL", "MkVL", 1), r"sequence 1 \(q\): 'k' in position 2 is in lower case"),
        (A3M.replace("AGS", "A\0S"), "NUL character in line 2"),
        (f"{A3M}\0>102\n{QUERY[::-1]}\n\0", r"several queries \(q and 102\)"),
        ("#22,12\t1,1\n" + A3M, "complex .#22,12"),
        ("HEADER    HYDROLASE\n", "a PDB file"),
        ("# made by x\ndata_1ABC\n", "an mmCIF file"),
        ("just words\n", "no format known"),
        (STOCKHOLM.replace("//", ""), "cut off"),
        (STOCKHOLM * 2, "several Stockholm"),
    ],
)
def test_refusal_of_an_alignment_names_the_true_fault(
    content: str | bytes, fault: str, tmp_path: Path
):
    with pytest.raises(proteins.InputError) as refusal:
        alignment(content, tmp_path)
    assert re.search(fault, str(refusal.value)), refusal.value
    assert "\n" not in str(refusal.value)


# Structures


def place_of(i: int, name: str = "CA", shift: float = 0.0) -> tuple[float, float, float]:
    """Where the i-th residue of a helix is: neighbours are 3.8 Angstrom apart."""
    radius = {"CA": 2.3, "CB": 3.3}.get(name, 1.8)
    return (
        round(radius * np.cos(1.745 * i) + shift, 3),
        round(radius * np.sin(1.745 * i), 3),
        round(1.5 * i + (name == "C") - (name == "N"), 3),
    )


def helix(sequence: str, places: list[int], numbers: list, shift: float = 0.0) -> gemmi.Structure:
    """These residues of the sequence under these numbers, of which some have an insertion code."""
    chain, model, structure = gemmi.Chain("A"), gemmi.Model(1), gemmi.Structure()
    for i, number in zip(places, numbers, strict=True):
        residue = gemmi.Residue()
        residue.name = gemmi.expand_one_letter(sequence[i], gemmi.ResidueKind.AA)
        residue.seqid = gemmi.SeqId(str(number))
        residue.label_seq = i + 1
        residue.het_flag = "A"
        for name in ("N", "CA", "C") if sequence[i] == "G" else ("N", "CA", "C", "CB"):
            atom = gemmi.Atom()
            atom.name = name
            atom.element = gemmi.Element(name[0])
            atom.pos = gemmi.Position(*place_of(i, name, shift))
            residue.add_atom(atom)
        chain.add_residue(residue)
    model.add_chain(chain)
    structure.add_model(model)
    structure.setup_entities()
    names = gemmi.expand_one_letter_sequence(sequence, gemmi.ResidueKind.AA)
    structure.entities[0].full_sequence = names
    return structure


def pdb(*chain: object, known: bool = False, **options: float) -> str:
    """Its atoms in PDB's columns, behind the whole sequence if that is `known`."""
    lines = helix(*chain, **options).make_pdb_string().splitlines(keepends=True)
    records = ("ATOM", "SEQRES") if known else "ATOM"
    return "".join(line for line in lines if line.startswith(records))


def cif(*chain: object, labels: bool = True, known: bool = True) -> str:
    """The same as mmCIF, with or without label_seq_id and the whole sequence."""
    document = helix(*chain).make_mmcif_document()
    block = document.sole_block()
    for row in block.find("_atom_site.", ["label_seq_id"]) if not labels else ():
        row[0] = "."
    for category in () if known else ("_entity_poly.", "_entity_poly_seq."):
        block.find_mmcif_category(category).erase()
    return document.as_string()


def check(text: str, sequence: str, places: list[int], shift: float = 0.0) -> str:
    """Read a structure; observed are these residues, where the helix has them. Return the note."""
    coords, observed, note = proteins.read_structure(text, sequence)
    assert np.flatnonzero(observed).tolist() == places
    expected = [place_of(i, "CA" if sequence[i] == "G" else "CB", shift) for i in places]
    np.testing.assert_allclose(coords[places], expected, atol=2e-3)
    assert not coords[~observed].any()
    missing = len(sequence) - len(places)
    assert (f"{missing} of {len(sequence)} residues have no coordinates" in note) == bool(missing)
    return note


@pytest.mark.parametrize("write", words("numbers renumbered seqres cif label_only author_only"))
def test_unresolved_residues_are_where_the_numbers_say(write: str):
    """The sequence says nothing about where: it repeats."""
    rng = np.random.default_rng(0)
    sequence = "MKW" + "".join(rng.choice(["GGS", "SGG", "GS"], 14)) + "WRE"
    places = sorted(rng.choice(np.arange(3, len(sequence) - 3), 18, replace=False).tolist())
    places = [0, 1, 2, *places, *range(len(sequence) - 3, len(sequence))]
    numbers = [i + 1 for i in places]
    if write == "renumbered":  # one gap, which only the distance shows
        places = [i for i in range(len(sequence)) if not 9 <= i < 21]
        numbers = list(range(1, len(places) + 1))
    running = list(range(1, len(places) + 1))
    text = {
        "numbers": lambda: pdb(sequence, places, [n + 371 for n in numbers]),
        "renumbered": lambda: pdb(sequence, places, numbers),
        "seqres": lambda: pdb(sequence, places, [n - 20 for n in numbers], known=True),
        "cif": lambda: cif(sequence, places, running),
        "label_only": lambda: cif(sequence, places, running, known=False),
        "author_only": lambda: cif(sequence, places, numbers, labels=False, known=False),
    }[write]()
    check(text, sequence, places)


def test_what_numbers_and_the_whole_sequence_tell():
    places = list(range(4, 15))
    check(pdb("A" * 20, places, [i + 1 for i in places]), "A" * 20, places)
    # insertion codes and leaps of the numbers are no gaps
    numbers = [*range(1, 8), "7A", "7B", *range(8, 14), *range(30, 37)]
    check(pdb(QUERY, WHOLE, numbers), QUERY, WHOLE)
    # a chain may be mostly unresolved where its whole sequence is known
    some = QUERY, WHOLE[:8], NUMBERS[:8]
    check(pdb(*some, known=True), QUERY, WHOLE[:8])
    with pytest.raises(proteins.InputError, match="no chain matches"):
        proteins.read_structure(pdb(*some), QUERY)
    # residues beyond a sequence that is cut short have no place in it
    text = without(CIF, r"^A 22 ALA .*\n").replace(QUERY, QUERY[:-1])
    assert "1 of its residues are not in the query" in check(text, QUERY, WHOLE[:-1])


def test_what_differs_from_the_query_is_counted():
    chain = "GSHM" + QUERY[1:10] + "W" + QUERY[11:20]
    text = pdb(chain, list(range(23)), list(range(-3, 20)), known=True)
    coords, observed, note = proteins.read_structure(text, QUERY)
    assert observed.tolist() == [True] * 20 + [False] * 2
    np.testing.assert_allclose(coords[0], place_of(3, "CB"), atol=2e-3)
    assert note == (
        "chain A: 2 of 22 residues have no coordinates; 1 letters differ from the query's; "
        "3 of its residues are not in the query"
    )


WHOLE = list(range(22))
NUMBERS = list(range(1, 23))
PDB, CIF = pdb(QUERY, WHOLE, NUMBERS), cif(QUERY, WHOLE, NUMBERS)


OF_THE_FOURTH = r"^(ATOM .* A 4 \?) \S+ \S+ \S+"  # residue, its coordinates in mmCIF


def without(text: str, pattern: str, replacement: str = "") -> str:
    changed = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    assert changed != text
    return changed


def test_coordinates_that_are_no_numbers_are_not_observed():
    there = [i for i in WHOLE if i != 3]
    for value in ("     nan", "********"):
        check(without(PDB, r"^(.{22}   4 .{3}).{24}", rf"\g<1>{value * 3}"), QUERY, there)
    check(without(CIF, OF_THE_FOURTH, r"\g<1> ? . inf"), QUERY, there)


def test_an_atom_where_another_is_has_no_place():
    """An occupancy of zero says nothing: there are files that have none."""
    check(PDB.replace("  1.00 20.00", "  0.00 20.00"), QUERY, WHOLE)
    text = without(PDB, r"^(.{13}CB .{6}   [45] .{3}).{24}", r"\g<1>" + "   0.000" * 3)
    check(text, QUERY, [i for i in WHOLE if i not in (3, 4)])


@pytest.mark.parametrize("marks", ["AB", "  ", "12"])
def test_of_alternate_locations_the_highest_occupancy_is_taken(marks: str):
    line = next(line for line in PDB.splitlines() if line[13:15] == "CB")
    low, high = (
        f"{line[:16]}{mark}{line[17:30]}{x:8.3f}{line[38:54]}  {occupancy}\n"
        for mark, x, occupancy in zip(marks, (50.0, 60.0), ("0.20", "0.80"), strict=True)
    )
    for text in (low + high, high + low):
        coords, _, _ = proteins.read_structure(PDB.replace(line + "\n", text), QUERY)
        assert coords[0, 0] == 60.0


def test_the_first_model_is_read_without_what_is_no_protein():
    water, ligand = (pdb(QUERY + "AE", [i], [i + 1]).replace("ATOM  ", "HETATM") for i in (22, 23))
    model = f"{PDB}TER\n{water.replace('ALA', 'HOH')}{ligand}ENDMDL\n"
    second = pdb(QUERY, WHOLE, WHOLE, shift=9)
    text = f"MODEL        1\n{model}MODEL        2\n{second}ENDMDL\n"
    note = check(text, QUERY + "E", WHOLE)
    assert note == "chain A: 1 of 23 residues have no coordinates"


def test_of_two_copies_under_one_chain_the_first_is_read():
    """Without a TER between them."""
    copy = pdb(QUERY, WHOLE, NUMBERS, shift=50)
    assert "22 residues of a copy" in check(PDB + copy, QUERY, WHOLE)
    renumbered = PDB + pdb(QUERY, WHOLE, [22 + n for n in NUMBERS], shift=50)
    assert "22 of its residues are not in the query" in check(renumbered, QUERY, WHOLE)


@pytest.mark.parametrize("place", [5, 21])
def test_a_modified_residue_behind_a_ter_is_of_its_chain(place: int):
    """Inside of the chain or at its end."""
    sequence = f"{QUERY[:place]}M{QUERY[place + 1 :]}"
    parts = WHOLE[:place], [place], WHOLE[place + 1 :]
    before, modified, after = (pdb(sequence, part, part) if part else "" for part in parts)
    modified = modified.replace("MET", "MSE").replace("ATOM  ", "HETATM")
    check(f"{before}TER\n{modified}TER\n{after}TER\n", sequence, WHOLE)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (A3M, "looks like FASTA or A3M"),
        (STOCKHOLM, "Stockholm"),
        ("", "empty"),
        ("data_x\n_cell.length_a 1\n", "without coordinates"),
        (CIF[:-7], "not a readable mmCIF"),
        (PDB[:-30], "line 87 is cut off"),
        (without(PDB, r"^(.{30}).{8}", r"\g<1>  x1.0  "), "line 1 has no numbers"),
        (without(PDB, r"^(.{17})...", r"\g<1>UNK"), "no chain matches"),
        (without(PDB, ".*GLY.*\n").replace("CB ", "CG "), "no coordinates of C-beta"),
        (pdb(QUERY[::-1], WHOLE, WHOLE), "no chain matches"),
    ],
)
def test_refusal_of_a_structure_names_the_true_fault(content: str, fault: str, tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(proteins.InputError, match=fault) as refusal:
        text = proteins.read_text(path)
        proteins.read_structure(text, QUERY)
    assert "\n" not in str(refusal.value)


# The scripts


OPENFOLD = "tiny_openfold_v2"  # the other versions have the same data


def files(folder: Path, structure: str, msa: str = A3M) -> list[str]:
    """Arguments for a protein with these files."""
    paths = folder / "x.a3m", folder / "x.structure"
    for path, text in zip(paths, (msa, structure), strict=True):
        path.write_text(text)
    return ["--msa", str(paths[0]), "--structure", str(paths[1])]


UNRESOLVED = without(CIF, OF_THE_FOURTH, r"\g<1> ? ? ?")


def test_a_prepared_protein_is_that_of_its_files(tmp_path: Path):
    """Also where its coordinates are NaN: what is not observed must not leak into the loss."""
    argv, npz = files(tmp_path, UNRESOLVED), tmp_path / "x.npz"
    done = finished(ROOT / "examples/proteins.py", argv[1], argv[3], npz)
    assert done.stdout == f"{npz}: 2 sequences, 22 residues, 21 observed\n"
    sizes = words("--num-seqs 2 --seq-len 22")
    expected = batches(OPENFOLD, *sizes, *argv).next_batch()
    arrays = dict(np.load(npz))
    arrays["coords"][~arrays["observed"]] = np.nan
    np.savez(npz, **arrays)
    for msa in (npz, tmp_path):  # a folder of them
        found = batches(OPENFOLD, *sizes, "--msa", str(msa)).next_batch()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def prepared(**changes: object) -> dict:
    """The arrays of a prepared protein, with changes."""
    arrays = {"tokens": np.zeros((2, 4), np.uint8), "coords": np.ones((4, 3))}
    arrays["observed"] = np.ones(4) > 0
    return {name: value for name, value in (arrays | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (None, "not a .npz that examples/proteins.py prepared"),  # cut off
        ({"coords": None}, "not a .npz that examples/proteins.py prepared"),
        ({"tokens": np.full((2, 4), 21)}, "tokens must be whole numbers [depth, length], 0 to 21"),
        ({"coords": np.full((4, 3), np.nan)}, "coords must be floats [4, 3], finite"),
        ({"observed": np.zeros(4) > 0}, "observed must be bool [4], not all False"),
    ],
)
def test_a_prepared_file_that_is_wrong_is_one_line(changes: dict, fault: str, tmp_path: Path):
    path = tmp_path / "x.npz"
    np.savez(path, **prepared(**changes or {}))
    if changes is None:
        path.write_bytes(path.read_bytes()[:-100])
    assert_one_error(run_main(OPENFOLD, tmp_path, "--msa", str(path)), 2, f"--msa {path}: {fault}")
    path.write_text(A3M)
    assert_one_error(run_main(OPENFOLD, tmp_path, "--msa", str(path)), 2, str(path), "--structure")
