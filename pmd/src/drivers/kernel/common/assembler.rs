//! A small assembler for eBPF. Instruction set: RFC 9669; kernel extensions: `linux/bpf.h`.

use std::collections::HashMap;

/// Numbers of the kernel's functions for programs (`BPF_FUNC_*`).
pub(crate) mod function {
    pub(crate) const MAP_LOOKUP_ELEM: i32 = 1;
    pub(crate) const MAP_UPDATE_ELEM: i32 = 2;
    pub(crate) const MAP_DELETE_ELEM: i32 = 3;
    pub(crate) const REDIRECT: i32 = 23;
    pub(crate) const SKB_LOAD_BYTES: i32 = 26;
    pub(crate) const XDP_ADJUST_TAIL: i32 = 65;
    /// Linux 5.18.
    pub(crate) const XDP_GET_BUFF_LEN: i32 = 188;
    /// Linux 5.18.
    pub(crate) const XDP_LOAD_BYTES: i32 = 189;
    /// Linux 5.18.
    pub(crate) const XDP_STORE_BYTES: i32 = 190;
}

/// Returns a 16-bit field in network order, as a program loads it.
pub(crate) const fn be16(value: u16) -> u32 {
    u16::from_ne_bytes(value.to_be_bytes()) as u32
}

/// Copies `bytes` bytes of the frame from offset R7 to the stack, with one of the functions `*_LOAD_BYTES`. R6 holds
/// the context. Jumps to `fail` if the frame is shorter. Clobbers R0 to R5.
pub(crate) fn load_bytes(a: &mut Assembler, function: i32, to: i16, bytes: i32, fail: Label) {
    a.copy(Register::R1, Register::R6);
    a.copy(Register::R2, Register::R7);
    a.copy(Register::R3, Register::R10);
    a.add(Register::R3, to.into());
    a.set(Register::R4, bytes);
    a.call(function);
    a.jump_if(Register::R0, Condition::NotEqual, 0, fail);
}

/// A register. `R10` is the frame pointer, which is read-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs, dead_code)]
pub(crate) enum Register {
    R0 = 0,
    R1,
    R2,
    R3,
    R4,
    R5,
    R6,
    R7,
    R8,
    R9,
    R10,
}

/// Width of a memory access: the size bits of the opcode.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
#[allow(dead_code)]
pub(crate) enum Width {
    /// 32 bits.
    Word = 0x00,
    /// 16 bits.
    Half = 0x08,
    /// 8 bits.
    Byte = 0x10,
    /// 64 bits.
    Double = 0x18,
}

/// Condition of a jump: the operation bits of the opcode.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub(crate) enum Condition {
    /// Equal.
    Equal = 0x10,
    /// Unsigned greater.
    Greater = 0x20,
    /// Unsigned less.
    Less = 0xa0,
    /// Any of the bits set.
    Bits = 0x40,
    /// Not equal.
    NotEqual = 0x50,
}

/// A jump target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Label(u32);

/// A program under construction.
#[derive(Debug, Default)]
pub(crate) struct Assembler {
    code: Vec<[u8; 8]>,
    labels: u32,
    positions: HashMap<Label, usize>,
    jumps: Vec<(usize, Label)>,
}

const PSEUDO_MAP_FD: u8 = 1;
const PSEUDO_MAP_VALUE: u8 = 2;
const PSEUDO_KFUNC_CALL: u8 = 2;

impl Assembler {
    fn emit(&mut self, opcode: u8, destination: u8, source: u8, offset: i16, immediate: i32) {
        let [o0, o1] = offset.to_le_bytes();
        let [i0, i1, i2, i3] = immediate.to_le_bytes();
        // RFC 9669 section 3.1: on little-endian machines the destination register is the lower half of the
        // byte.
        self.code.push([opcode, source << 4 | destination, o0, o1, i0, i1, i2, i3]);
    }

    /// Returns a new label that is not bound yet.
    pub(crate) fn label(&mut self) -> Label {
        self.labels += 1;
        Label(self.labels)
    }

    /// Binds a label to the current position.
    pub(crate) fn bind(&mut self, label: Label) {
        self.positions.insert(label, self.code.len());
    }

    /// `to = from`.
    pub(crate) fn copy(&mut self, to: Register, from: Register) {
        self.emit(0xbf, to as u8, from as u8, 0, 0);
    }

    /// `to = value`.
    pub(crate) fn set(&mut self, to: Register, value: i32) {
        self.emit(0xb7, to as u8, 0, 0, value);
    }

    /// `to += value`.
    pub(crate) fn add(&mut self, to: Register, value: i32) {
        self.emit(0x07, to as u8, 0, 0, value);
    }

    /// `to += from`.
    pub(crate) fn add_register(&mut self, to: Register, from: Register) {
        self.emit(0x0f, to as u8, from as u8, 0, 0);
    }

    /// `to -= from`.
    pub(crate) fn subtract_register(&mut self, to: Register, from: Register) {
        self.emit(0x1f, to as u8, from as u8, 0, 0);
    }

    /// `to |= value`.
    pub(crate) fn or(&mut self, to: Register, value: i32) {
        self.emit(0x47, to as u8, 0, 0, value);
    }

    /// `to &= value`.
    pub(crate) fn and(&mut self, to: Register, value: i32) {
        self.emit(0x57, to as u8, 0, 0, value);
    }

    /// `to <<= bits`.
    pub(crate) fn shift_left(&mut self, to: Register, bits: i32) {
        self.emit(0x67, to as u8, 0, 0, bits);
    }

    /// `to >>= bits`, unsigned.
    pub(crate) fn shift_right(&mut self, to: Register, bits: i32) {
        self.emit(0x77, to as u8, 0, 0, bits);
    }

    /// Converts the low 16 bits from host to network order and clears the others.
    pub(crate) fn network_order_16(&mut self, register: Register) {
        self.emit(0xdc, register as u8, 0, 0, 16);
    }

    /// `to = *(base + offset)`.
    pub(crate) fn load(&mut self, width: Width, to: Register, base: Register, offset: i16) {
        self.emit(0x61 | width as u8, to as u8, base as u8, offset, 0);
    }

    /// `*(base + offset) = from`.
    pub(crate) fn store(&mut self, width: Width, base: Register, offset: i16, from: Register) {
        self.emit(0x63 | width as u8, base as u8, from as u8, offset, 0);
    }

    /// `*(base + offset) = value`.
    pub(crate) fn store_value(&mut self, width: Width, base: Register, offset: i16, value: i32) {
        self.emit(0x62 | width as u8, base as u8, 0, offset, value);
    }

    /// Adds the value of `one`, which must be 1, to the 64-bit word at `base + offset` atomically.
    pub(crate) fn atomic_add(&mut self, base: Register, offset: i16, one: Register) {
        self.emit(0xdb, base as u8, one as u8, offset, 0);
    }

    /// `to` = address of the map with this descriptor.
    pub(crate) fn load_map(&mut self, to: Register, descriptor: i32) {
        self.emit(0x18, to as u8, PSEUDO_MAP_FD, 0, descriptor);
        self.emit(0, 0, 0, 0, 0);
    }

    /// `to` = address of the value of the array map with this descriptor, which has one entry (Linux 5.2).
    pub(crate) fn load_value(&mut self, to: Register, descriptor: i32) {
        self.emit(0x18, to as u8, PSEUDO_MAP_VALUE, 0, descriptor);
        self.emit(0, 0, 0, 0, 0);
    }

    /// Calls a helper by its number (`BPF_FUNC_*`). Arguments are in R1 to R5, the result is in R0.
    pub(crate) fn call(&mut self, helper: i32) {
        self.emit(0x85, 0, 0, 0, helper);
    }

    /// Calls a kernel function by its BTF id.
    pub(crate) fn call_kernel(&mut self, function: i32) {
        self.emit(0x85, 0, PSEUDO_KFUNC_CALL, 0, function);
    }

    /// Returns R0.
    pub(crate) fn exit(&mut self) {
        self.emit(0x95, 0, 0, 0, 0);
    }

    /// Jumps unconditionally.
    pub(crate) fn jump(&mut self, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.emit(0x05, 0, 0, 0, 0);
    }

    /// Jumps if the comparison of `register` with `value` holds (64 bits; the value is sign-extended).
    pub(crate) fn jump_if(&mut self, register: Register, condition: Condition, value: i32, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.emit(0x05 | condition as u8, register as u8, 0, 0, value);
    }

    /// Jumps if the comparison holds for the lower halves of `register` and `value`.
    pub(crate) fn jump_if_32(&mut self, register: Register, condition: Condition, value: u32, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.emit(0x06 | condition as u8, register as u8, 0, 0, value as i32);
    }

    /// Jumps if the comparison of two registers holds.
    pub(crate) fn jump_if_register(&mut self, left: Register, condition: Condition, right: Register, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.emit(0x0d | condition as u8, left as u8, right as u8, 0, 0);
    }

    /// Returns the instructions. An error says what is wrong with the program.
    pub(crate) fn finish(mut self) -> Result<Vec<[u8; 8]>, &'static str> {
        for (at, label) in self.jumps {
            let target = *self.positions.get(&label).ok_or("a jump refers to a label without a position")?;
            let distance = i16::try_from(target as i64 - at as i64 - 1).map_err(|_| "a jump is too long")?;
            self.code[at][2..4].copy_from_slice(&distance.to_le_bytes());
        }
        Ok(self.code)
    }
}

#[cfg(test)]
mod tests {
    use super::Register::*;
    use super::*;

    /// Expected encodings are those of LLVM (`llvm-mc -triple=bpfel -show-encoding`).
    #[test]
    fn instructions_are_encoded_as_llvm_does() {
        let mut a = Assembler::default();
        a.copy(R6, R1);
        a.set(R0, 2);
        a.load(Width::Word, R2, R6, 16);
        a.load(Width::Half, R3, R10, -8);
        a.load(Width::Byte, R4, R2, 14);
        a.store(Width::Half, R1, 12, R3);
        a.store_value(Width::Double, R10, -8, 0);
        a.network_order_16(R3);
        a.shift_left(R4, 2);
        a.call(51);
        a.exit();
        let expected: [[u8; 8]; 11] = [
            [0xbf, 0x16, 0, 0, 0, 0, 0, 0],
            [0xb7, 0x00, 0, 0, 2, 0, 0, 0],
            [0x61, 0x62, 16, 0, 0, 0, 0, 0],
            [0x69, 0xa3, 0xf8, 0xff, 0, 0, 0, 0],
            [0x71, 0x24, 14, 0, 0, 0, 0, 0],
            [0x6b, 0x31, 12, 0, 0, 0, 0, 0],
            [0x7a, 0x0a, 0xf8, 0xff, 0, 0, 0, 0],
            [0xdc, 0x03, 0, 0, 16, 0, 0, 0],
            [0x67, 0x04, 0, 0, 2, 0, 0, 0],
            [0x85, 0x00, 0, 0, 51, 0, 0, 0],
            [0x95, 0x00, 0, 0, 0, 0, 0, 0],
        ];
        assert_eq!(a.finish().unwrap(), expected);
    }

    #[test]
    fn jumps_reach_their_labels_both_ways() {
        let mut a = Assembler::default();
        let (back, ahead) = (a.label(), a.label());
        a.bind(back);
        a.jump_if(R0, Condition::Equal, 0, ahead);
        a.jump(back);
        a.bind(ahead);
        a.exit();
        let code = a.finish().unwrap();
        assert_eq!(code[0], [0x15, 0, 1, 0, 0, 0, 0, 0]);
        assert_eq!(code[1], [0x05, 0, 0xfe, 0xff, 0, 0, 0, 0]);
    }

    #[test]
    fn a_missing_label_is_an_error() {
        let mut a = Assembler::default();
        let nowhere = a.label();
        a.jump(nowhere);
        assert!(a.finish().is_err());
    }
}
