"""The prefill room as a plain process: `python -m services.prefill SETTINGS`."""

from common.runtime.process import main
from services.prefill.room import PrefillRoom

if __name__ == "__main__":
    main(lambda settings, secret, replica: PrefillRoom(settings, secret=secret, replica=replica))
