"""Drop-in helpers for trainers: functions for the custom-generate hooks of miles (`r3router.trainers.miles`) and slime (`…slime`)."""
