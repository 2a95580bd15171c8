"""Recording of runs: `read(folder)` returns the recorded streams; `schema` declares every stream and field."""

from verl.recording.reader import Recording, RecordingError, Stream, read

__all__ = ["Recording", "RecordingError", "Stream", "read"]
