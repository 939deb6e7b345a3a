//! What lasts is said when it begins, now and then while it goes on, and when it ends: a line for each look would bury all others.
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Pause before the same is said again.
pub const AGAIN: Duration = Duration::from_secs(300);

/// Something that may go on for long.
#[derive(Debug, Default)]
pub struct Seldom(Mutex<Option<Lasting>>);

#[derive(Clone, Copy, Debug)]
struct Lasting {
    began: Instant,
    said: Instant,
}

impl Seldom {
    /// It is so now. Whether to say it, and for how long it has been so.
    pub fn on(&self) -> (bool, Duration) {
        self.at(Instant::now())
    }

    fn at(&self, now: Instant) -> (bool, Duration) {
        let mut lasting = self.0.lock();
        match &mut *lasting {
            None => {
                *lasting = Some(Lasting { began: now, said: now });
                (true, Duration::ZERO)
            }
            Some(lasting) => {
                let say = now.duration_since(lasting.said) >= AGAIN;
                if say {
                    lasting.said = now;
                }
                (say, now.duration_since(lasting.began))
            }
        }
    }

    /// It is over. For how long it was so, when it was.
    pub fn off(&self) -> Option<Duration> {
        self.0.lock().take().map(|lasting| lasting.began.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{AGAIN, Seldom};

    #[test]
    fn what_lasts_is_said_at_its_beginning_and_every_few_minutes() {
        let (seldom, begin, second) = (Seldom::default(), Instant::now(), Duration::from_secs(1));
        assert_eq!(seldom.at(begin), (true, Duration::ZERO));
        assert_eq!(seldom.at(begin + second), (false, second));
        assert_eq!(seldom.at(begin + AGAIN), (true, AGAIN));
        assert_eq!(seldom.at(begin + AGAIN + second), (false, AGAIN + second));
        assert_eq!(seldom.at(begin + AGAIN * 2), (true, AGAIN * 2));
        assert!(seldom.off().is_some());
        assert_eq!(seldom.off(), None);
        assert_eq!(seldom.at(begin), (true, Duration::ZERO), "it begins anew");
    }
}
