"""The decode room as a plain process: `python -m services.decode SETTINGS`."""

from common.runtime.process import main
from services.decode.room import DecodeRoom

if __name__ == "__main__":
    main(lambda settings, secret, replica: DecodeRoom(settings, secret=secret, replica=replica))
