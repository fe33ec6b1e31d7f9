"""Settings that a training writes down when it begins, and that must be the same when it is gone on with."""

import json
from pathlib import Path
from typing import Any

from diskbuf.errors import OptionError
from diskbuf.store import files


def keep(path: Path, settings: dict[str, Any]) -> None:
    """Writes the settings down, or compares them with those that are there.

    Args:
        path: Of a JSON file in the training's folder.
        settings: JSON values by name; more may be in the file.

    Raises:
        OptionError: If one of them is another than in the file, or the file is none of this kind.
    """
    try:
        known = json.loads(path.read_text())
        known.items()
    except FileNotFoundError:
        files.replace_file(path, json.dumps(settings, indent=2).encode(), sync=True)
        return
    except (ValueError, AttributeError) as error:
        raise OptionError(f"{path} must hold the settings of a training as JSON, but doesn't. Remove it.") from error
    for name, value in json.loads(json.dumps(settings)).items():
        if known.get(name) != value:
            raise OptionError(
                f"{name} must be {known.get(name)!r} to go on with the training in {path.parent}, got {value!r}. "
                "Use that, or another root_dir."
            )
