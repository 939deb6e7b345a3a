//! What stands in the place of a payload.
#![no_main]
use libfuzzer_sys::fuzz_target;
use r3router_core::r3::descriptor::Descriptor;

fuzz_target!(|data: &[u8]| {
    for bytes in [data.to_vec(), [b"R3H1", data].concat()] {
        if let Ok(d) = Descriptor::decode(&bytes) {
            assert_eq!(Descriptor::decode(&d.encode()).expect("what was written is read"), d);
        }
    }
});
