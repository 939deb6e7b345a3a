//! The text that the plug-in puts in a payload's place: base64 of the magic `R3H1` and compact JSON.
use super::pattern::R3Shape;

/// Describes `rows` rows from position `pos` on, which lie at offset 0 of `uri`.
pub(crate) fn encode(uri: &str, pos: u32, rows: u32, shape: R3Shape, crc32: u32) -> String {
    let json = format!(
        r#"R3H1{{"uri":{},"offset":0,"pos":{pos},"rows":{rows},"dtype":"{}","shape":[{rows},{},{}],"crc32":{crc32}}}"#,
        serde_json::Value::from(uri),
        shape.narrow_dtype(),
        shape.layers,
        shape.top_k,
    );
    base64_simd::STANDARD.encode_to_string(json)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_is_the_magic_and_compact_json() {
        let text = encode("http://h:1/r3/7", 5, 3, R3Shape { layers: 2, top_k: 4, experts: 256 }, 9);
        let bytes = base64_simd::STANDARD.decode_to_vec(text).unwrap();
        assert_eq!(
            bytes,
            br#"R3H1{"uri":"http://h:1/r3/7","offset":0,"pos":5,"rows":3,"dtype":"uint8","shape":[3,2,4],"crc32":9}"#
        );
    }
}
