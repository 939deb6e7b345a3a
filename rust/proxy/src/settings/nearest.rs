//! The valid name that is closest to a misspelt one.

/// Edits (insert, delete, change, swap of neighbours) between two words.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before = vec![0; b.len() + 1];
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let change = last[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            row[j] = change.min(last[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before[j - 2] + 1);
            }
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

/// The candidate with the fewest edits to `word`, or none when even that one is a different word. A candidate that
/// `word` is the beginning or end of counts as near.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let limit = (word.chars().count() / 3).max(2);
    candidates
        .into_iter()
        .map(|c| {
            let edits = distance(word, c);
            let part =
                word.len() >= 4 && (c.starts_with(word) || c.ends_with(word) || word.starts_with(c) && c.len() >= 4);
            (if part { edits.min(limit) } else { edits }, c)
        })
        .filter(|(edits, _)| *edits <= limit)
        .min_by_key(|(edits, c)| (*edits, c.len()))
        .map(|(_, c)| c)
}
