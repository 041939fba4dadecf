//! Decoder of x86-64 instructions that load from a clock page: their length and destination.
//!
//! Source: Intel SDM volume 2. It knows the loads that compilers use for registers: `mov`, `movbe`, and moves of 16
//! bytes into a vector register. Other instructions are left to the program's own fault handling.

use crate::store_decoder::{legacy_prefixes, memory_operand, operand_size};

/// Destination of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// General register of this number, in the order of [`crate::store_decoder::Registers::general`].
    General(usize),
    /// Vector register of this number, whose lower 16 bytes are loaded.
    Vector(usize),
}

/// A decoded load instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Length of the instruction in bytes.
    pub length: usize,
    /// Number of bytes loaded.
    pub size: usize,
    /// Destination.
    pub to: Destination,
    /// True if the bytes are swapped (`movbe`).
    pub is_swapped: bool,
}

impl Load {
    /// Returns the new value of a general register with the value `old`, for loaded bytes.
    pub fn general(&self, old: u64, bytes: [u8; 16]) -> u64 {
        let mut word = [0; 8];
        word[..self.size].copy_from_slice(&bytes[..self.size]);
        if self.is_swapped {
            word[..self.size].reverse();
        }
        let loaded = u64::from_le_bytes(word);
        // A load of 32 bits clears the upper half. One of 16 bits leaves the rest.
        if self.size == 2 { old & !0xffff | loaded } else { loaded }
    }
}

/// Decodes the instruction at the start of `code`. Returns `None` if it is truncated or not a known load.
pub fn decode(code: &[u8]) -> Option<Load> {
    let (mut at, operand16, repeat) = legacy_prefixes(code)?;
    let (mut wide, mut high) = (false, 0);
    if code.get(at)? & 0xf0 == 0x40 {
        (wide, high) = (code[at] & 8 != 0, (code[at] & 4) << 1);
        at += 1;
    }
    let size = operand_size(wide, operand16);
    let (size, is_vector, is_swapped) = match (*code.get(at)?, code.get(at + 1), code.get(at + 2)) {
        (0x8b, ..) => (size, false, false),
        (0x0f, Some(0x38), Some(0xf0)) if repeat == 0 => {
            at += 2;
            (size, false, true)
        }
        // movups, movupd, movaps, movapd; movdqa, movdqu.
        (0x0f, Some(0x10 | 0x28), _) if repeat == 0 => {
            at += 1;
            (16, true, false)
        }
        (0x0f, Some(0x6f), _) if operand16 || repeat == 0xf3 => {
            at += 1;
            (16, true, false)
        }
        _ => return None,
    };
    let (reg, length) = memory_operand(code, at + 1)?;
    let reg = usize::from(reg | high);
    let to = if is_vector { Destination::Vector(reg) } else { Destination::General(reg) };
    (length <= code.len()).then_some(Load { length, size, to, is_swapped })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store_decoder::tests::assemble;
    use wirepath_testlab::{Requirement, require};

    #[test]
    fn loads_as_the_assembler_writes_them() {
        require!(Requirement::Program("as"), Requirement::Program("objcopy"));
        let general = |register, size| (Destination::General(register), size, false);
        let swapped = |register, size| (Destination::General(register), size, true);
        let vector = |register| (Destination::Vector(register), 16, false);
        for (instruction, (to, size, is_swapped)) in [
            ("mov (%rdi), %eax", general(0, 4)),
            ("mov 4(%rdx), %r9d", general(9, 4)),
            ("mov 0x400(%r13), %r11", general(11, 8)),
            ("mov 8(%rsp,%rcx,8), %rdx", general(2, 8)),
            ("mov 0x10(%rip), %rsi", general(6, 8)),
            ("mov 0x410(,%rax,1), %ecx", general(1, 4)),
            ("mov 4(%rbp), %dx", general(2, 2)),
            ("movbe 4(%rdi), %eax", swapped(0, 4)),
            ("movbe (%r12), %r14", swapped(14, 8)),
            ("movups 8(%rax), %xmm9", vector(9)),
            ("movaps (%r8), %xmm1", vector(1)),
            ("movdqu 8(%rax), %xmm0", vector(0)),
            ("movdqa 16(%rax), %xmm15", vector(15)),
        ] {
            let mut code = assemble(instruction);
            let length = code.len();
            for cut in 0..length {
                assert_eq!(decode(&code[..cut]), None, "{instruction}, {cut} bytes of it");
            }
            code.extend([0x90; 15]);
            assert_eq!(decode(&code), Some(Load { length, size, to, is_swapped }), "{instruction}: {code:02x?}");
        }
    }

    #[test]
    fn other_instructions_are_not_decoded() {
        for code in [
            &[0x48, 0x89, 0x07][..], // mov %rax, (%rdi)
            &[0x48, 0x8b, 0xc7],     // mov %rdi, %rax
            &[0x0f, 0xb6, 0x07],     // movzbl (%rdi), %eax
            &[0xf3, 0x0f, 0x10, 0],  // movss (%rax), %xmm0
            &[0x90],
            &[0x66; 15],
        ] {
            assert_eq!(decode(code), None, "{code:02x?}");
        }
    }

    #[test]
    fn registers_get_what_the_processor_would_load() {
        let bytes = std::array::from_fn(|at| at as u8 + 1);
        let load = |size, is_swapped| {
            Load { length: 3, size, to: Destination::General(0), is_swapped }.general(u64::MAX, bytes)
        };
        assert_eq!(load(2, false), 0xffff_ffff_ffff_0201);
        assert_eq!(load(4, false), 0x0403_0201);
        assert_eq!(load(4, true), 0x0102_0304);
        assert_eq!(load(8, false), 0x0807_0605_0403_0201);
        assert_eq!(load(8, true), 0x0102_0304_0506_0708);
    }
}
