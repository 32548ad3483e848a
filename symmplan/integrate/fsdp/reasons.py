"""Why a collective did not run where it was planned."""

from __future__ import annotations

NOT_PLANNED = "the plan does not know this collective"
CROWDED = "other modules' parameters were needed at the same time"
FLAT = "it was gathered in ordinary memory, as when it was recorded"
NOT_OURS = "its buffer came from elsewhere"
OTHER_GROUP = "it ran over another group than planned"
OTHER_OP = "the memory backend has no such reduction"
IN_USE = "its bytes were still in use"
WIDER = "its gradients were wider than when it was recorded"
PUT_OFF = "it was to be gathered ahead of its time, for which the plan has no room"
SAME_PLAN = "a new plan would have been no other than the last"
NO_ROOM = "outside of training passes a plan has room for one module more"
