//! Request ids that the router makes: the client's id, a mark, and 16 random hex digits.
//!
//! Engines abort by prefix (`running.startswith(aborted)`), so no live id may be the beginning of another. Two ids `A = X~r` and
//! `B = Y~s` with tails of one length and no mark inside the tail: if A is a proper prefix of B, then B's mark stands behind all of A, so
//! Y begins with A - the client would have to name its request after a live id of the router. That happens when a client takes an id
//! from a reply and sends it again, so a tail of our own is cut off a client's id first.

/// Separates the client's id from the random tail.
pub const MARK: char = '~';
/// Hex digits of the tail.
const TAIL: usize = 16;
/// Stands for the client's id when there is none.
const NONE: &str = "r3";

/// The part of a client's id that the router's ids begin with: the id without tails that an earlier hop of the router has added.
pub fn stem(client: &str) -> &str {
    let mut stem = client;
    while let Some((head, tail)) = stem.rsplit_once(MARK) {
        if tail.len() != TAIL || !tail.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
            break;
        }
        stem = head;
    }
    stem
}

/// A new id for one attempt of one sub-request.
pub fn make(client: Option<&str>) -> String {
    let stem = client.map_or(NONE, stem);
    let mut rid = String::with_capacity(stem.len() + 1 + TAIL);
    rid.push_str(stem);
    rid.push(MARK);
    let bits: u64 = rand::random();
    for at in (0..TAIL).rev() {
        let digit = (bits >> (4 * at)) & 0xf;
        rid.push(char::from_digit(digit as u32, 16).unwrap_or('0'));
    }
    rid
}

#[cfg(test)]
mod tests {
    use super::{make, stem};

    #[test]
    fn no_id_is_the_beginning_of_another() {
        let clients =
            [None, Some("ep-7::t3"), Some("ep-7::t30"), Some("ep-7::t3~"), Some("ep-7::t3~0"), Some(""), Some("~")];
        let mut rids: Vec<String> = clients.iter().flat_map(|c| (0..50).map(|_| make(*c))).collect();
        // Clients that send back what they have seen.
        let again: Vec<String> = rids.iter().map(|r| make(Some(r))).collect();
        let twice: Vec<String> = again.iter().map(|r| make(Some(r))).collect();
        rids.extend(again);
        rids.extend(twice);
        rids.sort();
        for pair in rids.windows(2) {
            assert!(!pair[1].starts_with(pair[0].as_str()), "{} begins {}", pair[0], pair[1]);
        }
    }

    #[test]
    fn an_id_begins_with_the_clients_and_has_a_fixed_tail() {
        let rid = make(Some("ep-7::t3"));
        assert!(rid.starts_with("ep-7::t3~"));
        assert_eq!(rid.len(), "ep-7::t3".len() + 17);
        assert_eq!(stem(&rid), "ep-7::t3");
        assert_eq!(stem("a~b"), "a~b");
        assert_eq!(make(None).len(), 19);
    }
}
