"""What the scaling policy tells routers: where it is kept in Ray's key-value store, and its shape.

    {"stages": {"prefill": {"target": 2, "frozen": false}, ...},
     "moves": {"prefill": 7, ...},
     "changes": [{"at": 1790000000.0, "stage": "prefill", "before": 1, "after": 2, "reason": ""}]}

`moves` counts changes of target since the policy began; `changes` holds the last ones.
"""

from __future__ import annotations

KEY, NAMESPACE = b"scaling", b"baton"
CLOSING = b"closing"  # beside it: there once the whole service ends
KEPT = 20  # changes
