"""Options on what sequences hold: documents of which they are packed, and images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from megatron_hexi.cli.bundles import Bundle
from megatron_hexi.cli.output import say
from megatron_hexi.errors import HexiError
from megatron_hexi.models import FROZEN_PARTS, Images, Job, read_documents
from megatron_hexi.plan.flags import flag_name, spell_flag


def _option(text: str, *flag: str, metavar: str | None = None) -> Any:
    return typer.Option(*flag, help=text, metavar=metavar, rich_help_panel="The job")


BatchShares = Annotated[
    bool,
    typer.Option(
        "--batch-shares",
        help="Plan for training with --hexi-batch-shares, which deals out each batch's documents anew: the "
        "plan has its units' rates, and with --document-lengths times are those of documents dealt out.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class SequenceContents(Bundle):
    """The documents of which sequences are packed, and the images in them."""

    document_lengths: Annotated[
        str | None,
        _option(
            "Tokens of the documents that are packed into sequences and attend within themselves "
            "(--dataloader-inter-document-masking, --sft): a JSON list, or lines of LENGTH or LENGTH COUNT, "
            "or log-normal, such as lognormal:1500,1.2,32768. Default: a sequence is one document.",
            metavar="FILE|lognormal:MEDIAN,SIGMA[,MAX]",
        ),
    ] = None

    images_per_sequence: Annotated[
        int | None,
        _option(
            "Images of a sequence, of a model with an encoder; a video is an image for each pair of its "
            "frames. Default: none, and the encoder is left out.",
            metavar="N",
        ),
    ] = None
    patches: Annotated[int | None, _option("Patches of an image before they are merged.", metavar="N")] = None
    freeze_vision_model: Annotated[
        bool, _option("The encoder, apart from its projectors, is not trained.", "--freeze-vision-model")
    ] = False
    freeze_vision_projection: Annotated[
        bool, _option("The projectors behind the encoder are not trained.", "--freeze-vision-projection")
    ] = False

    def with_contents(self, job: Job, *, dealt: bool, divided: bool = True) -> Job:
        """Return the job with the documents and images of the options.

        Notes say which documents are longer than a sequence, and that an encoder is left out.

        Args:
            dealt: whether every batch's documents are dealt out anew.
            divided: whether plans divide images among the units of a first stage.

        Raises:
            HexiError: options on images are given without their number and size, or the model has no encoder.
        """
        return self._with_documents(self._with_images(job, divided), dealt)

    def _with_images(self, job: Job, divided: bool) -> Job:
        count, patches, name = self.images_per_sequence, self.patches, job.model.name
        frozen = {field: getattr(self, field) for field in FROZEN_PARTS}
        if count is not None and patches is not None:
            return replace(job, images=Images(count, patches, divided, **frozen))
        given = {"images_per_sequence": count, "patches": patches}
        there = [spell_flag(field, value) for field, value in given.items() if value is not None]
        there += [flag_name(field) for field, value in frozen.items() if value]
        missing = " and ".join(flag_name(field) for field, value in given.items() if value is None)
        if there and job.model.vision is None:
            raise HexiError(f"{there[0]}: {name} has no encoder of images; leave it out")
        if there:
            raise HexiError(f"{there[0]}: counts only beside images; give {missing} too")
        if job.model.vision is not None:
            say(f"note: {name} has an encoder of images, which is left out; give {missing} to count it")
        return job

    def _with_documents(self, job: Job, dealt: bool) -> Job:
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
