"""The encoder room as a plain process: `python -m services.encoder SETTINGS`."""

from common.runtime.process import main
from services.encoder.room import EncoderRoom

if __name__ == "__main__":
    main(lambda settings, secret, replica: EncoderRoom(settings, secret=secret, replica=replica))
