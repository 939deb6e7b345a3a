//! How many rows each leg must have sent, and which of them make the reply that one unsplit engine would give.
//!
//! With `P` prompt tokens, `O` output tokens (the first is sampled on prefill) and a start `s`, an engine that ran the whole request
//! returns rows `[s, P+O-1)`. Prefill returns `[s, P)`. Decode returns `[s, P+O-1)` too, but what it has before row `P` is left over from
//! other requests. So the reply is prefill's rows, then decode's from row `P` on.
//!
//! Engines that do not know `routed_experts_start_len` return from row 0 whatever was asked; the counts show it. Replies do not say
//! how wide a row is: prefill's length shows it, and decode's must agree.
use crate::error::{Error, Kind, Source};

/// What is known of both legs' payloads when both have ended. Lengths in bytes, before base64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Legs {
    /// Prompt tokens as prefill counted them.
    pub prompt: u32,
    /// Output tokens as decode counted them; `None` where its reply does not say it (a streamed chat without usage).
    pub output: Option<u32>,
    /// The most output tokens that were asked for, when known.
    pub max_output: Option<u32>,
    /// Start that the client asked for, and that prefill got.
    pub start: u32,
    /// Start that decode got.
    pub decode_start: u32,
    /// Bytes of prefill's payload.
    pub prefill_len: u64,
    /// Bytes of decode's payload.
    pub decode_len: u64,
    /// Bytes of one number.
    pub item: u64,
    /// Numbers of a row, when an earlier reply has shown it.
    pub row_items: Option<u32>,
}

/// Which rows are taken, as row numbers of each leg's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Bytes of a row; 0 when there are no rows at all.
    pub row: u64,
    /// Output tokens.
    pub output: u32,
    /// Prefill's rows `[0, n)` lie before the client's start.
    pub prefill_skip: u64,
    /// Number of prefill's rows that are taken.
    pub prefill_rows: u64,
    /// Decode's rows `[0, n)` are not taken.
    pub decode_skip: u64,
    /// Number of decode's rows that are taken.
    pub decode_rows: u64,
}

impl Cut {
    /// Rows of the merged payload.
    pub fn rows(&self) -> u64 {
        self.prefill_rows + self.decode_rows
    }
}

/// Rows of an engine that starts at `from`: `[from, until)`.
fn span(from: u32, until: u64) -> u64 {
    until.saturating_sub(u64::from(from))
}

/// Widths of a row, bytes, that prefill's length allows: as if it obeyed `start`, and as if it ignored it. Equal ones are one.
pub fn widths(prompt: u32, start: u32, prefill_len: u64, item: u64, row_items: Option<u32>) -> [Option<u64>; 2] {
    let width = |from: u32| {
        let rows = span(from, u64::from(prompt));
        let row = if rows == 0 { None } else { (prefill_len.is_multiple_of(rows)).then_some(prefill_len / rows) }?;
        let fits = row > 0 && row.is_multiple_of(item) && row_items.is_none_or(|n| u64::from(n) * item == row);
        fits.then_some(row)
    };
    [width(start), if start == 0 { None } else { width(0) }]
}

/// Decides the cut.
///
/// # Errors
/// `R3Mismatch` when no reading of the lengths fits the counts, or when two do that differ; `limit` is the number of rows expected and
/// `measured` the number sent, for the leg at fault.
pub fn cut(legs: &Legs) -> Result<Cut, Error> {
    let prompt = u64::from(legs.prompt);
    let mut found: Option<Cut> = None;
    for prefill_from in starts(legs.start) {
        let prefill = span(prefill_from, prompt);
        for decode_from in starts(legs.decode_start) {
            let Some((row, output)) = row(legs, prefill, decode_from) else { continue };
            let until = (prompt + u64::from(output)).saturating_sub(1);
            let total = span(legs.start, until);
            let prefill_skip = u64::from(legs.start - prefill_from);
            let prefill_rows = (prefill - prefill_skip.min(prefill)).min(total);
            let decode_rows = total - prefill_rows;
            let decode_skip = span(decode_from, until) - decode_rows;
            let cut = Cut { row, output, prefill_skip, prefill_rows, decode_skip, decode_rows };
            match found {
                Some(other) if other != cut => return Err(ambiguous(legs, other.row, row)),
                _ => found = Some(cut),
            }
        }
    }
    found.ok_or_else(|| mismatch(legs))
}

/// With a start of the client's own, small counts can fit both an engine that knows the field and one that does not.
fn ambiguous(legs: &Legs, one: u64, other: u64) -> Error {
    let message = format!(
        "the lengths of the routed experts ({} and {} bytes) fit rows of {one} and of {other} bytes, so one cannot say which were sent",
        legs.prefill_len, legs.decode_len
    );
    let mut e = Error::new(Kind::R3Mismatch, Source::Decode, message);
    e.limit = Some(one as f64);
    e.measured = Some(other as f64);
    e.advise("once the router has seen a reply from row 0 on it knows the width")
}

/// The start that was asked for, and 0 for an engine that does not know the field.
fn starts(asked: u32) -> impl Iterator<Item = u32> {
    std::iter::once(asked).chain((asked > 0).then_some(0))
}

/// The width of a row and the number of output tokens, when prefill sent `prefill` rows and decode's begin at `decode_from`.
fn row(legs: &Legs, prefill: u64, decode_from: u32) -> Option<(u64, u32)> {
    let divide = |len: u64, rows: u64| (rows > 0 && len.is_multiple_of(rows)).then(|| len / rows).filter(|r| *r > 0);
    let hint = legs.row_items.map(|n| u64::from(n) * legs.item);
    let decode = |output: u32| span(decode_from, (u64::from(legs.prompt) + u64::from(output)).saturating_sub(1));
    let row = if prefill > 0 {
        divide(legs.prefill_len, prefill)?
    } else if legs.prefill_len > 0 {
        return None;
    } else {
        // Prefill had nothing to send; decode's own length shows the width, if it has rows at all.
        hint.or_else(|| divide(legs.decode_len, decode(legs.output?))).unwrap_or(0)
    };
    if (row > 0 && !row.is_multiple_of(legs.item)) || hint.is_some_and(|h| row > 0 && h != row) {
        return None;
    }
    if let Some(output) = legs.output {
        let rows = decode(output);
        return (legs.decode_len == row * rows && (row > 0 || rows == 0)).then_some((row, output));
    }
    // The reply does not say how many tokens came out: the rows do, and they must be a number that can be.
    let sent = if row == 0 { 0 } else { divide(legs.decode_len, row).or((legs.decode_len == 0).then_some(0))? };
    let (from, prompt) = (u64::from(decode_from), u64::from(legs.prompt));
    let output = u32::try_from((sent + from + 1).checked_sub(prompt)?).ok()?;
    (output >= 1 && legs.max_output.is_none_or(|most| output <= most)).then_some((row, output))
}

fn mismatch(legs: &Legs) -> Error {
    let prompt = u64::from(legs.prompt);
    let until = |output: u32| (prompt + u64::from(output)).saturating_sub(1);
    let [obeyed, ignored] = widths(legs.prompt, legs.start, legs.prefill_len, legs.item, legs.row_items);
    let Some(row) = obeyed.or(ignored) else {
        let rows = span(legs.start, prompt);
        let hint = legs.row_items.map(|n| u64::from(n) * legs.item);
        let message = format!(
            "prefill's routed experts do not fit its prompt: {} bytes for {rows} rows of {} tokens from row {}",
            legs.prefill_len, legs.prompt, legs.start
        );
        let sent = hint.map_or(f64::NAN, |h| legs.prefill_len as f64 / h as f64);
        let mut e = Error::new(Kind::R3Mismatch, Source::Prefill, message);
        e.limit = Some(rows as f64);
        e.measured = (!sent.is_nan()).then_some(sent);
        return e;
    };
    let sent = legs.decode_len as f64 / row as f64;
    let expected = legs.output.map(|o| span(legs.decode_start, until(o)));
    let message = format!(
        "decode's routed experts do not fit its tokens: {} bytes are {sent} rows of {row} bytes, {} prompt tokens, {} output tokens, from row {}",
        legs.decode_len,
        legs.prompt,
        legs.output.map_or_else(|| "an unknown number of".to_owned(), |o| o.to_string()),
        legs.decode_start
    );
    let mut e = Error::new(Kind::R3Mismatch, Source::Decode, message);
    e.limit = expected.map(|n| n as f64);
    e.measured = Some(sent);
    e
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 5 prompt tokens, 3 output tokens, rows of 2 layers x 2 experts x 4 bytes.
    fn legs() -> Legs {
        Legs {
            prompt: 5,
            output: Some(3),
            max_output: None,
            start: 0,
            decode_start: 0,
            prefill_len: 5 * 16,
            decode_len: 7 * 16,
            item: 4,
            row_items: None,
        }
    }

    fn taken(legs: &Legs) -> (u64, u64, u64, u64, u64) {
        let c = cut(legs).unwrap();
        (c.row, c.prefill_skip, c.prefill_rows, c.decode_skip, c.decode_rows)
    }

    #[test]
    fn prefill_gives_the_prompt_and_decode_the_rest() {
        assert_eq!(taken(&legs()), (16, 0, 5, 5, 2));
        assert_eq!(taken(&Legs { decode_start: 5, decode_len: 2 * 16, ..legs() }), (16, 0, 5, 0, 2));
        assert_eq!(taken(&Legs { decode_start: 4, decode_len: 3 * 16, ..legs() }), (16, 0, 5, 1, 2));
        assert_eq!(taken(&Legs { output: Some(1), decode_start: 5, decode_len: 0, ..legs() }), (16, 0, 5, 0, 0));
        let later = Legs { start: 3, decode_start: 5, prefill_len: 2 * 16, decode_len: 2 * 16, ..legs() };
        assert_eq!(taken(&later), (16, 0, 2, 0, 2));
        let delta = Legs { start: 5, decode_start: 5, prefill_len: 0, decode_len: 2 * 16, ..legs() };
        assert_eq!(taken(&delta), (16, 0, 0, 0, 2));
        assert_eq!(taken(&Legs { output: Some(1), decode_len: 0, ..delta }), (0, 0, 0, 0, 0));
    }

    #[test]
    fn engines_that_ignore_the_start_are_seen_by_their_counts() {
        assert_eq!(taken(&Legs { decode_start: 5, ..legs() }), (16, 0, 5, 5, 2));
        assert_eq!(taken(&Legs { start: 2, decode_start: 5, ..legs() }), (16, 2, 3, 5, 2));
        assert_eq!(taken(&Legs { start: 2, decode_start: 5, prefill_len: 3 * 16, ..legs() }), (16, 0, 3, 5, 2));
        assert_eq!(taken(&Legs { start: 2, decode_start: 5, decode_len: 2 * 16, ..legs() }), (16, 2, 3, 0, 2));
    }

    #[test]
    fn an_abort_before_the_first_token_gives_one_row_less_than_prefill_sent() {
        let aborted = Legs { output: Some(0), decode_start: 5, decode_len: 0, ..legs() };
        assert_eq!(taken(&aborted), (16, 0, 4, 0, 0));
        assert_eq!(taken(&Legs { decode_start: 0, decode_len: 4 * 16, ..aborted }), (16, 0, 4, 4, 0));
    }

    #[test]
    fn counts_that_do_not_fit_are_an_error_with_both_numbers() {
        let e = cut(&Legs { decode_len: 6 * 16, ..legs() }).unwrap_err();
        assert_eq!((e.kind, e.source, e.limit, e.measured), (Kind::R3Mismatch, Source::Decode, Some(7.0), Some(6.0)));
        let e = cut(&Legs { decode_len: 4 * 16, ..legs() }).unwrap_err();
        assert_eq!((e.limit, e.measured), (Some(7.0), Some(4.0)));
        let e = cut(&Legs { prefill_len: 5 * 16 + 4, ..legs() }).unwrap_err();
        assert_eq!((e.source, e.limit), (Source::Prefill, Some(5.0)));
        let e = cut(&Legs { row_items: Some(4), prefill_len: 4 * 16, ..legs() }).unwrap_err();
        assert_eq!((e.source, e.limit, e.measured), (Source::Prefill, Some(5.0), Some(4.0)));
        // A row is a whole number of items.
        assert!(cut(&Legs { prefill_len: 5 * 6, decode_len: 7 * 6, ..legs() }).is_err());
        assert!(cut(&Legs { row_items: Some(8), ..legs() }).is_err());
    }

    #[test]
    fn lengths_that_can_be_read_two_ways_are_refused_unless_the_width_is_known() {
        // One row of 24 bytes from row 5 on, or six of 4 from row 0 on?
        let two = Legs { start: 5, decode_start: 5, prefill_len: 0, output: Some(2), decode_len: 24, ..legs() };
        assert_eq!(cut(&two).unwrap_err().kind, Kind::R3Mismatch);
        let c = cut(&Legs { row_items: Some(1), ..two }).unwrap();
        assert_eq!((c.row, c.decode_skip, c.decode_rows), (4, 5, 1));
        let c = cut(&Legs { row_items: Some(6), ..two }).unwrap();
        assert_eq!((c.row, c.decode_skip, c.decode_rows), (24, 0, 1));
    }

    #[test]
    fn where_the_reply_does_not_count_the_rows_must_be_possible() {
        let unknown = Legs { output: None, max_output: Some(4), decode_start: 5, decode_len: 2 * 16, ..legs() };
        assert_eq!(cut(&unknown).unwrap().output, 3);
        // 7 rows from row 5 would be 8 tokens, more than asked for: the start was ignored.
        let c = cut(&Legs { decode_len: 7 * 16, ..unknown }).unwrap();
        assert_eq!((c.output, c.decode_skip, c.decode_rows), (3, 5, 2));
        assert!(cut(&Legs { decode_len: 3 * 16, decode_start: 0, ..unknown }).is_err());
        assert!(cut(&Legs { decode_len: 2 * 16 + 4, ..unknown }).is_err());
    }
}
