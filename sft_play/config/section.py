"""What all sections of the config have in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the config: immutable, and unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )
