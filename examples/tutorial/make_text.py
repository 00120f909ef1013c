"""Make a Megatron data set of real text, Python's own language reference: ``python make_text.py PREFIX``."""

import sys
from pydoc_data.topics import topics

import numpy
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

END_OF_DOCUMENT = 256

prefix = sys.argv[1]
builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
for _, text in sorted(topics.items()):
    document = numpy.append(numpy.frombuffer(text.encode(), numpy.uint8), numpy.uint16(END_OF_DOCUMENT))
    builder.add_document(document, [document.size])
builder.finalize(f"{prefix}.idx")
