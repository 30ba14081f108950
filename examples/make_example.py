"""Make bpti.a3m and bpti.cif from two packages (see README.md).

Usage: python make_example.py 5PTI.cif.gz DB.fasta.gz OUTPUT_FOLDER
Needs: pip install gemmi==0.7.5 pyhmmer==0.12.3
"""

import gzip
import sys
from pathlib import Path

import gemmi
import pyhmmer
from pyhmmer.easel import Alphabet, SequenceFile, TextSequence

MIN_COVERAGE, MAX_IDENTITY = 0.75, 0.90


def to_a3m(query, row):
    """Columns with a query residue stay; residues in all other columns become lower case."""
    out = ""
    for q, r in zip(query, row, strict=True):
        if q.isalpha():
            out += r.upper() if r.isalpha() else "-"
        elif r.isalpha():
            out += r.lower()
    return out


def upper(row):
    return [c for c in row if not c.islower()]


def identity(a, b):
    pairs = [(x, y) for x, y in zip(upper(a), upper(b), strict=True) if "-" not in (x, y)]
    return sum(x == y for x, y in pairs) / max(len(pairs), 1)


def main(cif_gz, fasta_gz, folder):
    cif = gzip.decompress(Path(cif_gz).read_bytes())
    (Path(folder) / "bpti.cif").write_bytes(cif)
    block = gemmi.cif.read_string(cif.decode()).sole_block()
    sequence = block.find_value("_entity_poly.pdbx_seq_one_letter_code_can")

    abc = Alphabet.amino()
    query = TextSequence(name="5PTI_A", sequence=sequence).digitize(abc)
    with (
        gzip.open(fasta_gz, "rb") as handle,
        SequenceFile(handle, digital=True, alphabet=abc) as reader,
    ):
        database = reader.read_block()
    search = pyhmmer.plan7.Pipeline(abc, incE=1e-3, incdomE=1e-3).iterate_seq(query, database)
    for result in search:  # the jackhmmer rounds: search, align, build a profile, search again
        if result.converged or result.iteration >= 5:
            break
    msa = result.msa.textize()

    rows = []
    for found, row in zip(msa.sequences, msa.alignment, strict=True):
        text = found.description.replace("[subseq from] ", "").replace(" Split=0", "")
        rows.append((f"{found.name} {text}", to_a3m(msa.alignment[0], row)))
    rows.sort(key=lambda item: -identity(sequence, item[1]))
    kept = [("5PTI_A bovine pancreatic trypsin inhibitor (BPTI), PDB 5PTI chain A", sequence)]
    for name, row in rows:
        covered = sum(c != "-" for c in upper(row)) / len(sequence)
        if covered >= MIN_COVERAGE and all(identity(row, old) <= MAX_IDENTITY for _, old in kept):
            kept.append((name, row))
    (Path(folder) / "bpti.a3m").write_text("".join(f">{name}\n{row}\n" for name, row in kept))


if __name__ == "__main__":
    main(*sys.argv[1:4])
