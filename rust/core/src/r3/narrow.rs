//! Rows between the width of the wire and the width they are held in. Little-endian throughout.
use super::Dtype;

/// Writes the low byte of each int32 of `src` to `dst`. The result has every bit that any number had: when it is 255 or less, all fit.
pub fn to_u8(src: &[u8], dst: &mut [u8]) -> u32 {
    let mut all = 0;
    for (d, s) in dst.iter_mut().zip(src.as_chunks::<4>().0) {
        let n = u32::from_le_bytes(*s);
        all |= n;
        *d = n as u8;
    }
    all
}

/// As [`to_u8`], with two bytes a number; all fit when the result is 65,535 or less.
pub fn to_u16(src: &[u8], dst: &mut [u8]) -> u32 {
    let mut all = 0;
    for (d, s) in dst.as_chunks_mut::<2>().0.iter_mut().zip(src.as_chunks::<4>().0) {
        let n = u32::from_le_bytes(*s);
        all |= n;
        *d = (n as u16).to_le_bytes();
    }
    all
}

/// Writes numbers held as `held` to `dst` as int32.
pub fn to_i32(held: Dtype, src: &[u8], dst: &mut [u8]) {
    let dst = dst.as_chunks_mut::<4>().0;
    match held {
        Dtype::U8 => {
            for (d, s) in dst.iter_mut().zip(src) {
                *d = u32::from(*s).to_le_bytes();
            }
        }
        Dtype::U16 => {
            for (d, s) in dst.iter_mut().zip(src.as_chunks::<2>().0) {
                *d = u32::from(u16::from_le_bytes(*s)).to_le_bytes();
            }
        }
        Dtype::I32 => {
            for (d, s) in dst.iter_mut().zip(src.as_chunks::<4>().0) {
                *d = *s;
            }
        }
    }
}

/// The narrowest width for numbers that together have the bits `all`. Negative numbers have the top bit and stay int32.
pub fn fit(all: u32) -> Dtype {
    match all {
        0..=0xff => Dtype::U8,
        0x100..=0xffff => Dtype::U16,
        _ => Dtype::I32,
    }
}

/// Widens the first `items` numbers of `buf` in place, back to front.
pub fn widen(buf: &mut [u8], items: usize, from: Dtype, to: Dtype) {
    for i in (0..items).rev() {
        let n = match from {
            Dtype::U8 => u32::from(buf[i]),
            Dtype::U16 => u32::from(u16::from_le_bytes([buf[2 * i], buf[2 * i + 1]])),
            Dtype::I32 => return,
        };
        match to {
            Dtype::U8 => return,
            Dtype::U16 => buf[2 * i..2 * i + 2].copy_from_slice(&(n as u16).to_le_bytes()),
            Dtype::I32 => buf[4 * i..4 * i + 4].copy_from_slice(&n.to_le_bytes()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wire(numbers: &[i32]) -> Vec<u8> {
        numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
    }

    #[test]
    fn numbers_survive_every_width_that_fits_them() {
        for numbers in [&[0, 255, 7, 1][..], &[256, 65_535, 0], &[-1, 65_536, i32::MIN, i32::MAX, 3]] {
            let src = wire(numbers);
            let mut narrow = vec![0; numbers.len()];
            let all = to_u8(&src, &mut narrow);
            let mut two = vec![0; 2 * numbers.len()];
            assert_eq!(to_u16(&src, &mut two), all);
            let held = fit(all);
            let mut back = vec![9; src.len()];
            match held {
                Dtype::U8 => to_i32(held, &narrow, &mut back),
                Dtype::U16 => to_i32(held, &two, &mut back),
                Dtype::I32 => to_i32(held, &src, &mut back),
            }
            assert_eq!(back, src);
        }
        assert_eq!(fit(u32::from_le_bytes((-1i32).to_le_bytes())), Dtype::I32);
    }

    #[test]
    fn widening_in_place_keeps_every_number() {
        let numbers: Vec<i32> = (0..1000).map(|i| i % 256).collect();
        for to in [Dtype::U16, Dtype::I32] {
            let mut buf = vec![0; 4000];
            to_u8(&wire(&numbers), &mut buf[..1000]);
            widen(&mut buf, 1000, Dtype::U8, to);
            let mut back = vec![0; 4000];
            to_i32(to, &buf[..1000 * to.size()], &mut back);
            assert_eq!(back, wire(&numbers));
        }
        let mut buf = vec![0; 4000];
        to_u16(&wire(&numbers), &mut buf[..2000]);
        widen(&mut buf, 1000, Dtype::U16, Dtype::I32);
        assert_eq!(buf, wire(&numbers));
    }
}
