//! Finds kernel functions in the BTF type information (Documentation/bpf/btf.rst), for programs that call
//! them.

const FUNCTION: u32 = 12;

/// Returns the id of a function in BTF data. `None` if there is none of that name or the data is malformed.
pub(super) fn function_id(btf: &[u8], name: &str) -> Option<u32> {
    let word = |at: usize| Some(u32::from_ne_bytes(*btf.get(at..)?.first_chunk()?));
    if word(0)? & 0xffff != 0xeb9f {
        return None;
    }
    let (header, types, types_len) = (word(4)? as usize, word(8)? as usize, word(12)? as usize);
    let (strings, strings_len) = (word(16)? as usize, word(20)? as usize);
    let types = btf.get(header.checked_add(types)?..)?.get(..types_len)?;
    let strings = btf.get(header.checked_add(strings)?..)?.get(..strings_len)?;
    let word = |at: usize| Some(u32::from_ne_bytes(*types.get(at..)?.first_chunk()?));
    let (mut at, mut id) = (0usize, 1u32);
    while at < types.len() {
        let (name_at, info) = (word(at)? as usize, word(at + 4)?);
        let (kind, members) = ((info >> 24) & 0x1f, (info & 0xffff) as usize);
        let text = strings.get(name_at..)?;
        if kind == FUNCTION && text.starts_with(name.as_bytes()) && text.get(name.len()) == Some(&0) {
            return Some(id);
        }
        // Bytes behind the three words of `struct btf_type`, by kind.
        at += 12
            + match kind {
                1 | 14 | 17 => 4,                // INT, VAR, DECL_TAG
                3 => 12,                         // ARRAY
                4 | 5 | 15 | 19 => 12 * members, // STRUCT, UNION, DATASEC, ENUM64
                6 | 13 => 8 * members,           // ENUM, FUNC_PROTO
                _ => 0,
            };
        id += 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_functions_and_survives_cut_data() {
        // Header, one INT with its extra word, one FUNC; strings "\0int\0f\0".
        let mut btf = Vec::new();
        for word in [0x0001_eb9fu32, 24, 0, 28, 28, 7] {
            btf.extend_from_slice(&word.to_ne_bytes());
        }
        for word in [1, 1 << 24, 4, 32, 5, FUNCTION << 24, 0] {
            btf.extend_from_slice(&u32::to_ne_bytes(word));
        }
        btf.extend_from_slice(b"\0int\0f\0");
        assert_eq!(function_id(&btf, "f"), Some(2));
        assert_eq!(function_id(&btf, "int"), None, "a type, not a function");
        for cut in 0..btf.len() {
            assert_eq!(function_id(&btf[..cut], "f"), None);
        }
    }
}
