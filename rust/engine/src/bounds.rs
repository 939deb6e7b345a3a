//! Bounds of numbers that a person writes: each is declared once, read by the command line, and held again before it is used.
use serde::Serialize;
use serde_json::Value;

/// Name of an option, least and most. A name is written with `_`, as the field is.
pub type Bound = (&'static str, f64, f64);

/// Refuses the first number of `options` that is outside, by its option's name. What is left out (null where the default is) is fine.
///
/// # Errors
/// `--max-running 0 is not between 1 and 1000000`.
pub fn check<T: Serialize + Default>(options: &T, bounds: &[Bound]) -> Result<(), String> {
    let json = |options: &T| serde_json::to_value(options).map_err(|e| e.to_string());
    let (given, defaults) = (json(options)?, json(&T::default())?);
    for &(name, low, high) in bounds {
        let flag = || format!("--{}", name.replace('_', "-"));
        match given.get(name) {
            None => return Err(format!("{} has bounds and does not exist", flag())),
            // JSON has neither NaN nor infinity: where a number is needed, null is one of those.
            Some(Value::Null) if defaults.get(name).is_some_and(Value::is_null) => {}
            Some(value) => {
                if !value.as_f64().is_some_and(|n| (low..=high).contains(&n)) {
                    let shown = if value.is_null() { "not a number".to_owned() } else { value.to_string() };
                    return Err(format!("{} {shown} is not between {low} and {high}", flag()));
                }
            }
        }
    }
    Ok(())
}

/// The bounds as JSON: `{"port": [0, 65535], ...}`.
pub fn json(bounds: &[Bound]) -> String {
    let map: serde_json::Map<_, _> =
        bounds.iter().map(|&(name, low, high)| (name.to_owned(), serde_json::json!([low, high]))).collect();
    Value::Object(map).to_string()
}
