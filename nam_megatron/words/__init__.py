"""The ground floor: types that everything else speaks in. It imports nothing of ours but itself."""
