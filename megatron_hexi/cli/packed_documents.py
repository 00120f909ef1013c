"""Options of jobs whose sequences are packed of documents."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from megatron_hexi.cli.bundles import Bundle
from megatron_hexi.cli.output import say
from megatron_hexi.models import Job, read_documents

BatchShares = Annotated[
    bool,
    typer.Option(
        "--batch-shares",
        help="Plan for training with --hexi-batch-shares, which deals out each batch's documents anew: the "
        "plan has its units' rates, and with --document-lengths times are those of documents dealt out.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class PackedDocuments(Bundle):
    """The documents of which sequences are packed."""

    document_lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens of the documents that are packed into sequences and attend within themselves "
            "(--dataloader-inter-document-masking, --sft): a JSON list, or lines of LENGTH or LENGTH COUNT, "
            "or log-normal, such as lognormal:1500,1.2,32768. Default: a sequence is one document.",
            metavar="FILE|lognormal:MEDIAN,SIGMA[,MAX]",
            rich_help_panel="The job",
        ),
    ] = None

    def with_documents(self, job: Job, *, dealt: bool) -> Job:
        """Return the job with the documents of the option, with a note on those longer than a sequence.

        Args:
            dealt: whether every batch's documents are dealt out anew.
        """
        if self.document_lengths is None:
            return job
        documents = replace(read_documents(self.document_lengths), dealt=dealt)
        longer = documents.longer_than(job.seq_length)
        if longer:
            say(
                f"note: --document-lengths {self.document_lengths}: {longer:.2%} of the documents are longer "
                f"than a sequence of {job.seq_length} tokens, and count as cut at its ends"
            )
        return replace(job, documents=documents)
