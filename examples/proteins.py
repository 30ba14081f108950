#!/usr/bin/env python3
"""Read real proteins for TinyOpenFold: an alignment and the structure of its query.

The scripts load this file where --structure asks for it. As a program it prepares one .npz, with
which a single copied script runs alone (only NumPy is needed there):

    python examples/proteins.py FILE.a3m FILE.cif protein.npz
    python tiny_openfold_v2.py --msa protein.npz

Alignments are A3M or aligned FASTA (MMseqs2, ColabFold, HH-suite) or Stockholm (jackhmmer), query
first; structures are PDB or mmCIF. Each may be gzipped. Needs gemmi.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import itertools
import math
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

try:
    import gemmi
    import numpy as np
except ImportError as error:
    if __name__ != "__main__":
        raise
    print(f"proteins.py: error: {error}: pip install gemmi numpy", file=sys.stderr)
    sys.exit(4)

AMINO_ACIDS = "ARNDCQEGHILKMFPSTWYV"  # tokens 0 to 19, as in the scripts
UNKNOWN, GAP = 20, 21
MIN_IDENTITY, MIN_COVERAGE = 0.9, 0.5  # of a chain that is taken for the query


class InputError(ValueError):
    """A file that cannot be used; the text is one line for its owner."""


# Text and what it looks like

MAGIC = {
    b"PK\x03\x04": "a zip archive (a prepared .npz goes without --structure)",
    b"\x83\xa7encoder": "BinaryCIF",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\x93NUMPY": "a NumPy array",
    b"\x89HDF": "an HDF5 file",
    b"\xff\xfe": "UTF-16 text (save it as UTF-8)",
    b"\xfe\xff": "UTF-16 text (save it as UTF-8)",
}
PDB_RECORDS = "HEADER|TITLE |COMPND|REMARK|CRYST1|SEQRES|MODEL |ATOM  |HETATM|EXPDTA|HELIX |PARENT"
# By the first line that is neither empty nor, unless named here, a comment.
FORMATS = {
    r"# STOCKHOLM": "a Stockholm alignment",
    r"#NEXUS": "a NEXUS file",
    r">P1;": "a PIR file",
    r">": "FASTA or A3M",
    r"(?i)data_": "an mmCIF file",
    PDB_RECORDS: "a PDB file",
    r"CLUSTAL|MUSCLE|PROBCONS": "a Clustal alignment",
    r"PileUp|!!\w\w_MULT|.*MSF:": "an MSF alignment",
    r"\s*\d+\s+\d+\s*$": "a PHYLIP alignment",
    r"HMMER\d|HHsearch \d": "a profile HMM",
    r"Query +\S": "a result of HHsearch or HHblits",
    r"LOCUS |ID   ": "a GenBank or UniProt entry",
    r"@<TRIPOS>": "a MOL2 file",
    r"(?i)<!doctype html|<html": "an HTML page",
    r"<": "XML",
    r"[{[]": "JSON",
}


def read_text(path: Path) -> str:
    """Read a text in UTF-8, gzipped or not; InputError says what it is instead."""
    if path.exists() and not path.is_file():  # a pipe can be read only once, /dev/zero has no end
        raise InputError("not a regular file")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(error.strerror) from None
    if content.startswith(b"\x1f\x8b"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"damaged gzip file ({error})") from None
    for magic, name in MAGIC.items():
        if content.startswith(magic):
            raise InputError(f"this is {name}")
    if 3 * content[:400].count(0) > len(content[:400]) > 9:
        raise InputError("this is binary data or UTF-16 text (save it as UTF-8)")
    text = content.decode("utf-8-sig", "replace")
    if not text.strip("\0\ufeff \t\r\n"):
        raise InputError("the file is empty")
    return text


def lines_of(text: str) -> list[str]:
    """Split at the ends of lines of any system, and at nothing else."""
    return re.split("\r\n|\r|\n", text)


def format_of(text: str) -> str:
    """Name the format that a text seems to have."""
    for line in lines_of(text):
        if name := next((name for sign, name in FORMATS.items() if re.match(sign, line)), None):
            return name
        if line.strip() and not line.startswith("#"):
            break
    return "text of no format known here"


# Alignments


def fasta_records(text: str) -> list[tuple[str, str]]:
    """List (name, row) of A3M or FASTA; lines with # are comments."""
    records: list[tuple[str, list[str]]] = []
    for line in lines_of(text):
        if line.startswith(">"):
            records.append((line[1:], []))
        elif records and not line.startswith("#"):
            records[-1][1].extend(line.split())
    return [(name, "".join(parts)) for name, parts in records]


def server_records(text: str) -> list[tuple[str, str]]:
    """List (name, row) of A3M as the MMseqs2 server sends it.

    A NUL ends each block, and several blocks of one query follow each other.
    """
    blocks = [block for block in text.split("\0") if block.strip()]
    if not all(block.lstrip().startswith((">", "#")) for block in blocks):
        line = len(lines_of(text.partition("\0")[0]))
        raise InputError(f"a NUL character in line {line}, inside of a record")
    first, *others = [fasta_records(block) for block in blocks]
    for other in others:
        if not other or other[0][1] != first[0][1]:
            name = printable(other[0][0] if other else "none")
            queries = f"({printable(first[0][0])} and {name})"
            raise InputError(f"the alignments of several queries {queries}: give one of them")
        first += other[1:]
    return first


def stockholm_records(text: str) -> list[tuple[str, str]]:
    """List (name, row) of a Stockholm file; blocks are joined, annotations left out."""
    body, end, rest = re.sub("\r\n?", "\n", text).partition("\n//")
    if not end:
        raise InputError("a Stockholm alignment without its last line '//': is it cut off?")
    if "# STOCKHOLM" in rest:
        raise InputError("several Stockholm alignments: give one")
    rows: dict[str, str] = {}
    for line in body.split("\n"):
        if line.strip() and not line.startswith("#"):
            name, *parts = line.split()
            rows[name] = rows.get(name, "") + "".join(parts)
    return [(name, row.upper().replace(".", "-")) for name, row in rows.items()]


def printable(name: str) -> str:
    """Return the first word of a name, fit for a terminal."""
    word = (name.split() or ["no name"])[0]
    return "".join(c if c.isprintable() else "?" for c in word)[:40]


def is_annotation(name: str) -> bool:
    """Tell rows that are no sequences by their names, as HH-suite does."""
    word = (name.split() or [""])[0]
    return word.startswith(("ss_", "sa_", "aa_")) or "_consensus" in word


def columns_of(rows: list[str]) -> list[str]:
    """Return rows without insertions and stop signs.

    A dot stands for a gap beside an insertion (A2M), which goes, or for any gap; a stop sign comes
    after the last column or in it. What makes all rows equally long is right.
    """
    readings = []
    for dot, stop in itertools.product(("", "-"), repeat=2):
        ended = (row[:-1] + stop if row.endswith("*") else row for row in rows)
        readings.append([re.sub("[a-z]", "", row).replace(".", dot) for row in ended])
        if len({len(row) for row in readings[-1]}) == 1:
            return readings[-1]
    return readings[0]


def read_alignment(text: str) -> np.ndarray:
    """Read an alignment -> tokens [depth, length] uint8.

    Rows of annotation, insertions (lower case) and stop signs (*) at the end are left out, and so
    are columns where the query has a gap. Letters other than the 20 amino acids are UNKNOWN.
    """
    kind = format_of(text)
    if kind == FORMATS[r"# STOCKHOLM"]:
        records = stockholm_records(text)
    elif kind == FORMATS[r">"]:
        if chains := re.search(r"^#(\d+(?:,\d+)+)\s", text, re.MULTILINE):
            lengths = f"#{chains[1]} heads it"
            raise InputError(f"the alignment of a complex ({lengths}): give that of one chain")
        records = server_records(text)
    else:
        raise InputError(f"neither A3M nor FASTA nor Stockholm: it looks like {kind}")
    numbered = [(i, *record) for i, record in enumerate(records, 1) if not is_annotation(record[0])]
    if not numbered:
        raise InputError("it has no sequence")
    for i, name, row in numbered:
        if wrong := re.search(r"[^A-Za-z.-]", row.removesuffix("*")):
            place = (
                f"sequence {i} ({printable(name)}): {wrong[0]!a} in position {wrong.start() + 1}"
            )
            raise InputError(f"{place} is neither an amino acid nor a gap")
    i, name, row = numbered[0]
    if lower := re.search("[a-z]", row):
        place = f"sequence {i} ({printable(name)}): {lower[0]!r} in position {lower.start() + 1}"
        raise InputError(f"{place} is in lower case, but the query has no insertions")
    rows = columns_of([row for _, _, row in numbered])
    if len(rows[0].replace("-", "")) < 2:
        raise InputError(f"sequence {i} ({printable(name)}), the query, has fewer than 2 residues")
    for (i, name, _), row in zip(numbered, rows, strict=True):
        if len(row) != len(rows[0]):
            columns = f"{len(row)} columns, the query {len(rows[0])} (lower case not counted)"
            plain = all(row.isupper() and row.isalpha() for _, _, row in numbered)
            hint = "; are these sequences aligned?" if plain else ""
            raise InputError(f"sequence {i} ({printable(name)}) has {columns}{hint}")
    code = np.full(128, UNKNOWN, dtype=np.uint8)
    code[[ord(letter) for letter in AMINO_ACIDS]] = np.arange(20)
    code[ord("-")] = GAP
    tokens = code[np.frombuffer("".join(rows).encode(), np.uint8).reshape(len(rows), -1)]
    return np.ascontiguousarray(tokens[:, tokens[0] != GAP])


# Structures

# Names of force fields (CHARMM, Amber, GROMACS, OPLS) for states of amino acids.
STATES = {
    "HIS": "HSD HSE HSP HSC HS1 HS2 HID HIE HIP HIN HIS1 HIS2 HISA HISB HISD HISE HISH HISP",
    "CYS": "CYX CYM CYN CYF CYS1 CYS2 CYSH CYSS",
    "ASP": "ASH ASPH ASPP AS4",
    "GLU": "GLH GLUH GLUP GL4",
    "LYS": "LYN LYSH LSN LYP LYSN",
    "ARG": "ARN ARGN",
    "TYR": "TYM TYRU",
}
ATOMS = ("N", "CA", "C", "CB")  # the others are not read
STANDARD = {state: name for name, states in STATES.items() for state in states.split()}


def is_long_name(name: str) -> bool:
    """Tell four letters of a force field: HISD, or Amber's N and C before the ends of a chain."""
    return len(name.strip()) == 4 and (
        name in STANDARD or (name[0] in "NC" and letter_of(name[1:]) != "X")
    )


def letter_of(name: str) -> str:
    """Return the amino acid of a residue's name, of a modified one its parent's; X for others."""
    name = name.upper()
    name = name[1:] if is_long_name(name) and name not in STANDARD else name
    letter = gemmi.find_tabulated_residue(STANDARD.get(name, name)).one_letter_code.upper()
    return letter if letter in AMINO_ACIDS else "X"


def is_modified(name: str) -> bool:
    """Is it an amino acid that has been changed, such as MSE?"""
    return letter_of(name) != "X" and not gemmi.find_tabulated_residue(name).is_standard()


@dataclass(frozen=True)
class Atom:
    """One of the atoms N, CA, C and CB, at one location."""

    chain: str
    number: int
    insertion: str
    residue: str
    name: str
    location: str
    occupancy: float
    position: tuple[float, float, float]

    @property
    def is_real(self) -> bool:
        """Tell that it has a place, and not what programs write for none (9999, or 0 0 0)."""
        there = all(math.isfinite(x) and abs(x) < 9999 for x in self.position)
        return there and (self.occupancy > 0 or any(self.position))


@dataclass(frozen=True)
class Residue:
    """The atoms with one number, perhaps of several residues (microheterogeneity)."""

    number: int
    atoms: list[Atom]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(atom.residue for atom in self.atoms))

    @property
    def is_amino_acid(self) -> bool:
        known = self.letter != "X" or gemmi.find_tabulated_residue(self.names[0]).is_amino_acid()
        return known or {"N", "CA", "C"} <= {atom.name for atom in self.atoms}

    @property
    def letter(self) -> str:
        return letter_of(self.atoms[0].residue)

    def letter_like(self, wanted: str) -> str:
        """Return the wanted letter if one of its residues has it, otherwise that of the first."""
        return wanted if wanted in map(letter_of, self.names) else self.letter

    def place(self, alpha: bool = False) -> tuple[float, float, float] | None:
        """Return where C-beta (of glycine C-alpha, or always) is, at its highest occupancy."""
        atoms = (
            atom
            for atom in self.atoms
            if atom.name == ("CA" if alpha or letter_of(atom.residue) == "G" else "CB")
        )
        best = max(filter(lambda a: a.is_real, atoms), key=lambda a: a.occupancy, default=None)
        return best.position if best else None


@dataclass(frozen=True)
class Contents:
    """What a structure file has of its first model."""

    atoms: list[Atom]
    sequences: dict[str, list[str]]  # of each chain, names of residues
    numbered: bool  # are numbers of residues places in the sequence?


def read_pdb(text: str) -> Contents:
    """Read a PDB file, whose sequences are in SEQRES.

    Ligands come behind the TER of their chain. There is also a modified residue, as a HETATM, where
    a program has put a TER before it: more of the chain follows, or it is the next residue.
    """
    atoms: list[Atom] = []
    behind: dict[str, list[Atom]] = {}  # the TER of a chain, and what follows decides
    sequences: dict[str, list[str]] = {}
    ended, chain = set(), ""
    for i, line in enumerate(lines_of(text), 1):
        record = line[:6].strip()
        if record == "SEQRES":
            sequences.setdefault(line[10:12].strip(), []).extend(line[19:70].split())
        elif record == "TER":
            ended.add(chain)
        elif record in ("MODEL", "ENDMDL", "END") and atoms:
            break
        if record not in ("ATOM", "HETATM"):
            continue
        name, location, residue = line[12:16].strip(), line[16:17].strip(), line[17:20].strip()
        if is_long_name(line[17:21]):
            residue = line[17:21]
        chain = line[20 + len(residue) // 4 : 22].strip() or line[72:76].strip()
        if name not in ATOMS:
            continue
        if len(line) < 54:
            raise InputError(f"line {i} is cut off")
        try:
            place = chain, residue_number(line[22:26].strip()), line[26:27].strip()
            position = tuple(number_of(line[k : k + 8]) for k in (30, 38, 46))
            occupancy = number_of(line[54:60])
        except ValueError:
            raise InputError(f"line {i} has no numbers where PDB's columns have them") from None
        occupancy = 1.0 if math.isnan(occupancy) else occupancy
        atom = Atom(*place, residue, name, location, occupancy, position)
        if record == "HETATM" and chain in ended:
            behind.setdefault(chain, []).append(atom)
        else:
            atoms += [*behind.pop(chain, []), atom]
    for chain, others in behind.items():
        last = max((atom.number for atom in atoms if atom.chain == chain), default=0)
        for atom in others:
            if is_modified(atom.residue) and atom.number in (last, last + 1):
                atoms.append(atom)
                last = atom.number
    return Contents(atoms, sequences, numbered=False)


def number_of(text: str) -> float:
    """Return the number in a field, nan for an empty one or what stands for no number."""
    return math.nan if text.strip(" *?.") == "" else float(text)


def residue_number(text: str) -> int:
    """Return the number of a residue, from 10000 on in base 36: A000."""
    return int(text) if text.lstrip("-").isdigit() else 10_000 + int(text, 36) - int("A000", 36)


def read_cif(text: str) -> Contents:
    """Read an mmCIF file, whose sequences are those of its entities."""
    try:
        document = gemmi.cif.read_string(text)
    except (ValueError, RuntimeError) as error:
        raise InputError(f"not a readable mmCIF file ({str(error).splitlines()[0]})") from None
    tags = "label_atom_id label_comp_id Cartn_x Cartn_y Cartn_z ?label_asym_id ?auth_asym_id "
    tags += "?label_seq_id ?auth_seq_id ?pdbx_PDB_ins_code ?label_alt_id ?occupancy "
    tags += "?pdbx_PDB_model_num ?label_entity_id"
    tables = [(block, block.find("_atom_site.", tags.split())) for block in document]
    block, table = next(((b, t) for b, t in tables if len(t)), (None, ()))
    if block is None:
        raise InputError("an mmCIF file without coordinates (_atom_site)")
    entities = dict(block.find("_struct_asym.", ["id", "entity_id"]))
    polymers: dict[str, list[str]] = {}
    for entity, sequence in block.find("_entity_poly.", ["entity_id", "pdbx_seq_one_letter_code"]):
        letters = "".join(gemmi.cif.as_string(sequence).split())
        with contextlib.suppress(RuntimeError):  # nucleic acids
            names = gemmi.expand_one_letter_sequence(letters, gemmi.ResidueKind.AA)
            polymers[entity] = names
    listed: dict[str, dict[str, str]] = {}
    for entity, i, name in block.find("_entity_poly_seq.", ["entity_id", "num", "mon_id"]):
        listed.setdefault(entity, {}).setdefault(i, name)  # the first one where several can be
    polymers |= {entity: list(names.values()) for entity, names in listed.items()}
    labelled = any(row.has(7) and not gemmi.cif.is_null(row[7]) for row in table)
    atoms, sequences, model = [], {}, None
    for row in table:
        if gemmi.cif.as_string(row[0]) not in ATOMS:
            continue
        values = [gemmi.cif.as_string(row[i]) if row.has(i) else "" for i in range(14)]
        name, residue, *xyz, label, author, seq, author_seq, insertion, alt, occ, here, own = values
        model = here if model is None else model
        number = seq if labelled else author_seq
        if here != model or not number:
            continue
        chain = author if label in (author, "") else f"{author} ({label})".strip()
        sequences[chain] = polymers.get(own or entities.get(label, ""), [])
        position = tuple(map(gemmi.cif.as_number, xyz))
        occupancy = gemmi.cif.as_number(occ, 1.0)
        insertion = "" if labelled else insertion
        try:
            atom = Atom(chain, int(number), insertion, residue, name, alt, occupancy, position)
        except ValueError:
            raise InputError(f"residue {residue} has the number {number!a}") from None
        atoms.append(atom)
    return Contents(atoms, sequences, labelled)


def chains_of(atoms: Iterable[Atom]) -> dict[str, tuple[list[Residue], int]]:
    """Sort atoms into residues -> of each chain its residues, and how many of copies are left out.

    Where atoms come again under the same number, a second molecule begins (a lost TER): a copy if
    its residues are those of the first, otherwise more of the chain, numbered anew.
    """
    parts: dict[str, list[dict]] = {}
    for atom in atoms:
        chain = parts.setdefault(atom.chain, [{}])
        key = (atom.number, atom.insertion)
        if key in chain[-1] and key != next(reversed(chain[-1])):
            same = ((a.name, a.location, a.residue) for a in chain[-1][key].atoms)
            if (atom.name, atom.location, atom.residue) in same:
                chain.append({})
        chain[-1].setdefault(key, Residue(atom.number, [])).atoms.append(atom)
    chains = {}
    for name, (first, *others) in parts.items():
        residues, left_out = list(first.values()), 0
        for part in others:
            again = part.keys() & first.keys()
            if sum(part[k].letter == first[k].letter for k in again) >= MIN_IDENTITY * len(again):
                left_out += len(part)
            else:
                residues += part.values()
        chains[name] = ([residue for residue in residues if residue.is_amino_acid], left_out)
    return chains


def place(letters: str, numbers: list[int], broken: list[bool], sequence: str) -> np.ndarray:
    """Align a chain with its sequence -> place of each residue there, -1 for none, [residues].

    A step in the sequence as large as that of the numbers is free, so unresolved residues are where
    the numbers leave them out. Other steps cost, less where the chain is `broken` before a residue.
    """
    steps = [1, *(b - a or 1 for a, b in itertools.pairwise(numbers))]
    target = np.frombuffer(sequence.encode(), np.uint8)
    size, index = len(target), np.arange(len(target))
    score = np.full(size, -np.inf)  # of the best alignment that ends in the residue before, here
    best = np.full(size, -np.inf)  # of the best that ends in any before, here or to the left
    best_from = np.full(size, -1)  # (residue, place) as one number
    origin = np.full((len(letters), size), -1)
    end, highest = -1, 0.0
    for j, (letter, step) in enumerate(zip(letters, steps, strict=True)):
        new = np.zeros(size)  # it begins here
        options = (
            (score, (j - 1) * size + index, step, 0.0),
            (score, (j - 1) * size + index, 1, 2.0 if broken[j] else 0.5),
            (best, best_from, 1, 1.0 if broken[j] else 3.0),
        )
        for value, source, distance, cost in options:
            if 0 < distance < size:
                better = value[:-distance] - cost > new[distance:]
                new[distance:][better] = (value[:-distance] - cost)[better]
                origin[j, distance:][better] = source[:-distance][better]
        known = (target != ord("X")) & (letter != "X")
        score = new + known * np.where(target == ord(letter), 1.0, -1.0)
        score += 1e-3 * (index == numbers[j] - 1)  # of equal ones the place that is its number
        if score.max() > highest:
            highest, end = score.max(), j * size + int(score.argmax())
        left = np.maximum.accumulate(score)
        rises = np.concatenate(([True], left[1:] > left[:-1]))
        left_from = j * size + np.maximum.accumulate(np.where(rises, index, 0))
        best_from = np.where(left > best, left_from, best_from)
        best = np.maximum(left, best)
    places = np.full(len(letters), -1)
    while end >= 0:
        places[end // size] = end % size
        end = origin[end // size, end % size]
    return places


@dataclass(frozen=True)
class Match:
    """A chain along the query [length]."""

    chain: str
    coords: np.ndarray  # [length, 3], Angstrom, 0 where not observed
    observed: np.ndarray  # [length], bool
    same: int  # letters of the query that the chain's sequence has
    differ: int  # letters where it has others
    covered: int  # both, and unknown ones
    remarks: list[str]
    fault: str  # why it cannot be one chain, or ""

    def rank(self) -> tuple[int, bool, int]:
        """Return what makes one chain better than another."""
        return self.same - self.differ, not self.fault, int(self.observed.sum())


def match(name: str, residues: list[Residue], contents: Contents, query: str) -> Match:
    """Find the residues of the query in a chain, through its whole sequence where that is known."""
    letters = "".join(residue.letter for residue in residues)
    numbers = [residue.number for residue in residues]
    alphas = [residue.place(alpha=True) or (math.nan,) * 3 for residue in residues]
    broken = [False, *(math.dist(a, b) > 4.5 for a, b in itertools.pairwise(alphas))]
    whole = "".join(map(letter_of, contents.sequences.get(name, ())))
    if whole:
        places = np.array(numbers) - 1
        inside = [
            (r, whole[i]) for i, r in zip(places, residues, strict=True) if 0 <= i < len(whole)
        ]
        fits = sum(residue.letter_like(letter) in (letter, "X") for residue, letter in inside)
        if not contents.numbered or fits < MIN_IDENTITY * len(residues):
            places = place(letters, numbers, broken, whole)
        places = np.where(places < len(whole), places, -1)  # a list of residues that is cut short
        in_query = np.arange(len(whole))
        if whole != query:
            in_query = place(whole, list(in_query + 1), [False] * len(whole), query)
        places = np.where(places < 0, -1, in_query[places])
        there = {i: whole[j] for j, i in enumerate(in_query) if i >= 0}
    else:
        places, there = place(letters, numbers, broken, query), {}
    coords, observed = np.zeros((len(query), 3), np.float32), np.zeros(len(query), bool)
    found = [residue.place() for residue in residues]
    times = Counter(found)
    last, fault = None, ""
    for i, residue, position, alpha in zip(places, residues, found, alphas, strict=True):
        if i < 0:
            continue
        there[i] = residue.letter_like(query[i])
        if position and times[position] == 1:  # two residues at one place: nobody measured that
            coords[i], observed[i] = position, True
        if last and math.dist(alpha, last[1]) > 4.2 * abs(i - last[0]) + 10:
            distance = f"{math.dist(alpha, last[1]):.0f} Angstrom apart"
            fault = f"residues {last[0] + 1} and {i + 1} of the query are {distance}"
        if not math.isnan(alpha[0]):
            last = i, alpha
    known = {i: letter for i, letter in there.items() if "X" not in (letter, query[i])}
    same = sum(letter == query[i] for i, letter in known.items())
    remarks = []
    if missing := int((~observed).sum()):
        remarks.append(f"{missing} of {len(query)} residues have no coordinates")
    if differ := len(known) - same:
        remarks.append(f"{differ} letters differ from the query's")
    if beside := int((places < 0).sum()):
        remarks.append(f"{beside} of its residues are not in the query")
    return Match(name, coords, observed, same, differ, len(there), remarks, fault)


def read_structure(text: str, query: str) -> tuple[np.ndarray, np.ndarray, str]:
    """Read the chain that matches the query -> coords [length, 3], observed [length], and a note.

    Observed are residues whose C-beta (C-alpha of glycine) has finite coordinates, also at
    occupancy 0. Of several models the first is read, of several locations that of the highest
    occupancy. InputError if no chain has half of the query with 90 % of the letters.
    """
    if format_of(text) == FORMATS[r"(?i)data_"]:
        contents = read_cif(text)
    elif re.search("^(ATOM  |HETATM)", text, re.MULTILINE):
        contents = read_pdb(text)
    else:
        raise InputError(f"neither PDB nor mmCIF with atoms: it looks like {format_of(text)}")
    chains = chains_of(contents.atoms)
    matches = [match(name, chain, contents, query) for name, (chain, _) in chains.items() if chain]
    best = max(matches, key=Match.rank, default=None)
    if best is None:
        raise InputError("it has no chain of amino acids")
    identity = best.same / max(1, best.same + best.differ)
    if identity < MIN_IDENTITY or best.covered < MIN_COVERAGE * len(query):
        raise InputError(
            f"no chain matches the query of the alignment (best: {best.covered} of {len(query)} "
            f"residues aligned, {100 * identity:.0f} % identical; half and 90 % are needed)"
        )
    if best.fault:
        raise InputError(f"chain {best.chain} is not one molecule: {best.fault}")
    if not best.observed.any():
        raise InputError(f"chain {best.chain} has no coordinates of C-beta")
    remarks = best.remarks
    if left_out := chains[best.chain][1]:
        remarks = [*remarks, f"{left_out} residues of a copy under the same name are left out"]
    note = f"chain {best.chain}: {'; '.join(remarks)}" if remarks else ""
    return best.coords, best.observed, note


# Proteins

Arrays = dict[str, np.ndarray]  # tokens [depth, length], coords [length, 3], observed [length]


def read_protein(msa: Path, structure: Path) -> tuple[Arrays, str]:
    """Read one protein -> its arrays, and what did not match, or ""."""
    flag, path = "--msa", msa
    try:
        tokens = read_alignment(read_text(msa))
        query = "".join((AMINO_ACIDS + "X")[token] for token in tokens[0])
        flag, path = "--structure", structure
        coords, observed, note = read_structure(read_text(structure), query)
    except InputError as error:
        raise InputError(f"{flag} {path}: {error}") from None
    arrays = {"tokens": tokens, "coords": coords, "observed": observed}
    return arrays, f"{structure}: {note}" if note else ""


def files_of(flag: str, paths: list[Path], *endings: str) -> list[Path]:
    """List these files, and of folders those with one of these endings, by name."""
    files: list[Path] = []
    for path in paths:
        found = sorted(
            f for f in path.glob("*") if f.name.lower().removesuffix(".gz").endswith(endings)
        )
        if path.is_dir() and not found:
            raise InputError(
                f"{flag} {path}: no file in this folder ends in {' or '.join(endings)}"
            )
        files += found if path.is_dir() else [path]
    return files


def read_proteins(msa: list[Path], structure: list[Path]) -> list[tuple[Arrays, str]]:
    """Read the proteins of --msa and --structure: files or folders, in the same order."""
    alignments = files_of("--msa", msa, ".a3m", ".sto", ".fasta")
    structures = files_of("--structure", structure, ".pdb", ".ent", ".cif", ".mmcif")
    if len(alignments) != len(structures):
        found = f"{len(alignments)} alignments, --structure {len(structures)} structures"
        raise InputError(f"--msa has {found}: they belong together in this order")
    return [read_protein(*pair) for pair in zip(alignments, structures, strict=True)]


def main() -> int:
    """Prepare one protein."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("msa", type=Path, help="alignment, the query first")
    parser.add_argument("structure", type=Path, help="structure of the query")
    parser.add_argument("output", type=Path, help="file to write, .npz")
    args = parser.parse_args()
    if args.output.suffix != ".npz":
        parser.error(f"{args.output} must end in .npz")
    try:
        arrays, note = read_protein(args.msa, args.structure)
        np.savez_compressed(args.output, **arrays)
    except (InputError, OSError) as error:
        print(f"proteins.py: error: {error}", file=sys.stderr)
        return 2
    if note:
        print(f"proteins.py: note: {note}", file=sys.stderr)
    depth, length = arrays["tokens"].shape
    print(
        f"{args.output}: {depth} sequences, {length} residues, {arrays['observed'].sum()} observed"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
