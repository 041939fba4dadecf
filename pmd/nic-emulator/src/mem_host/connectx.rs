//! An emulated ConnectX in plain memory, ready for rules and packets. It has a send queue on a looped link
//! and receiving queue pairs.

use rustix::io::Errno;
use wirepath_nic_defs::mlx5::{
    CQE_BYTES, CQE_INVALID, CQE_OWNER, CQE_RESPONDER_ERROR, CQE_RESPONDER_SEND, CqeOwner, RECORD_SEND, UAR_BLUE_FLAME,
};
use wirepath_nic_defs::uverbs::ioctl::{self, Attribute, Header};
use wirepath_nic_defs::uverbs::{self as defs, mlx5 as abi, write};
use zerocopy::{FromZeros, IntoBytes};

use super::{BASE, EmulatorHarness, extended_write_command, write_command};

/// Address of commands, followed by attributes and replies.
const COMMAND: u64 = BASE;
const DATA: u64 = BASE + 0x1000;
/// Address of replies in the write form.
pub(super) const REPLY: u64 = BASE + 0x4000;
/// Address of the doorbell records.
const RECORDS: u64 = BASE + 0x5000;
const SEND_RING: u64 = BASE + 0x6000;
const SEND_CQ: u64 = BASE + 0x7000;
/// Address of the ring and the completions of each receiver.
const RECEIVE: u64 = BASE + 0x8000;
/// Address of the send buffers.
pub const SEND_BUFFER: u64 = BASE + 0x2_0000;
const BUFFERS: u64 = BASE + 0x4_0000;

/// Number of entries of every ring.
const ENTRIES: u32 = 64;
/// Size of a receive buffer in bytes.
const SLOT: u64 = 2048;
/// Number of receiving queue pairs.
pub const RECEIVERS: usize = 2;

/// Value of an attribute of a command in the ioctl form.
#[derive(Clone, Debug)]
pub enum AttributeValue {
    /// Handle of an object, or space for the handle of a new one.
    Handle(u32),
    /// A constant or flags.
    Number(u64),
    /// Input bytes.
    Bytes(Vec<u8>),
    /// Value of an enumeration, with a payload of two bytes.
    Choice(u8, u16),
    /// Output of this length in bytes.
    Room(usize),
}

/// A received packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceivedPacket {
    /// Index of the receiver.
    pub receiver: usize,
    /// Flow tag.
    pub tag: u32,
    /// Metadata register B.
    pub metadata: u32,
    /// Bytes that the device wrote.
    pub frame: Vec<u8>,
    /// The completion entry up to its timestamp.
    pub cqe: Vec<u8>,
}

/// An emulated ConnectX with its queues.
#[derive(Debug)]
pub struct Connectx {
    /// Emulator and memory.
    pub harness: EmulatorHarness,
    /// Handles of the receiving queue pairs.
    pub receivers: [u32; RECEIVERS],
    /// Handle of the sending queue pair.
    pub sender: u32,
    send_queue: u32,
    /// Memory key of all buffers.
    pub key: u32,
    sent: u32,
    completed: u32,
    /// Number of completions that each receiver has consumed.
    consumed: [u32; RECEIVERS],
}

/// Returns the commands that bring a queue pair from RESET to RTS.
fn ready(qp: u32) -> impl Iterator<Item = Vec<u8>> {
    [(1, 0x21), (2, 1), (3, 1)].into_iter().map(move |(state, mask)| {
        let change = write::ModifyQp {
            qp_handle: qp,
            attr_mask: mask,
            qp_state: state,
            port_num: 1,
            ..write::ModifyQp::new_zeroed()
        };
        write_command(write::MODIFY_QP, change.as_bytes(), &[], 0)
    })
}

impl Connectx {
    /// Creates the device with additional keys of `[[device]]`, such as `steering = { devx = true }`.
    ///
    /// # Panics
    /// If the device cannot be set up.
    pub fn new(keys: &str) -> Self {
        let harness = EmulatorHarness::new(&format!(
            "[[device]]\nkind = 'mlx5'\n{keys}\n[[device.port]]\nlink = 'loop'\nmtu = 1600\n"
        ));
        let run = |command: &[u8]| -> Vec<u32> {
            harness
                .write(COMMAND, command)
                .unwrap_or_else(|errno| panic!("{errno}: {:?}", harness.emulator.log().last()));
            harness.peek(REPLY, 64).chunks(4).map(|word| u32::from_ne_bytes(word.try_into().expect("four"))).collect()
        };
        let devx = keys.contains("devx = true");
        let context = abi::GetContext {
            total_num_bfregs: 16,
            num_low_latency_bfregs: 4,
            flags: if devx { abi::CONTEXT_DEVX } else { 0 },
            max_cqe_version: 1,
            ..abi::GetContext::new_zeroed()
        };
        run(&write_command(write::GET_CONTEXT, REPLY.as_bytes(), context.as_bytes(), 8 + 72));
        let pd = run(&write_command(write::ALLOC_PD, REPLY.as_bytes(), &[], 8))[0];
        let length = RECEIVERS as u64 * u64::from(ENTRIES) * SLOT + BUFFERS - SEND_BUFFER;
        let mr = write::RegMr {
            response: REPLY,
            start: SEND_BUFFER,
            length,
            hca_va: SEND_BUFFER,
            pd_handle: pd,
            access_flags: defs::ACCESS_LOCAL_WRITE,
        };
        let key = run(&write_command(write::REG_MR, mr.as_bytes(), &[], 12))[1];
        let record = |at: u64| RECORDS + 64 * at;
        let create_cq = |ring: u64, at: u64| {
            let core = write::CreateCq {
                response: REPLY,
                user_handle: 0,
                cqe: ENTRIES - 1,
                comp_vector: 0,
                comp_channel: -1,
                reserved: 0,
            };
            let driver =
                abi::CreateCq { buf_addr: ring, db_addr: record(at), cqe_size: 64, ..abi::CreateCq::new_zeroed() };
            // Entries that the device has not written yet have an invalid opcode.
            harness.poke(ring, &[0xf0; 64 * CQE_BYTES]);
            run(&write_command(write::CREATE_CQ, core.as_bytes(), driver.as_bytes(), 16))[0]
        };
        let send_cq = create_cq(SEND_CQ, 0);
        let core = write::CreateQp {
            response: REPLY,
            pd_handle: pd,
            send_cq_handle: send_cq,
            recv_cq_handle: send_cq,
            max_send_wr: ENTRIES,
            max_send_sge: 1,
            qp_type: defs::QPT_RAW_PACKET as u8,
            ..write::CreateQp::new_zeroed()
        };
        let driver = abi::CreateQp {
            db_addr: record(1),
            sq_buf_addr: SEND_RING,
            sq_wqe_count: ENTRIES,
            ..abi::CreateQp::new_zeroed()
        };
        let qp = run(&write_command(write::CREATE_QP, core.as_bytes(), driver.as_bytes(), 32 + 40));
        for change in ready(qp[0]) {
            run(&change);
        }
        let receivers = std::array::from_fn(|at| {
            let (ring, completions) = (RECEIVE + 0x2000 * at as u64, RECEIVE + 0x2000 * at as u64 + 0x1000);
            let cq = create_cq(completions, 2 + 2 * at as u64);
            let core = write::CreateWq {
                pd_handle: pd,
                cq_handle: cq,
                max_wr: ENTRIES,
                max_sge: 1,
                ..write::CreateWq::new_zeroed()
            };
            let posted = record(3 + 2 * at as u64);
            let driver = abi::CreateWq {
                buf_addr: ring,
                db_addr: posted,
                rq_wqe_count: ENTRIES,
                rq_wqe_shift: 4,
                ..abi::CreateWq::new_zeroed()
            };
            let wq =
                run(&extended_write_command(REPLY, write::CREATE_WQ, core.as_bytes(), driver.as_bytes(), 24, 8))[2];
            let change = write::ModifyWq { attr_mask: 1, wq_handle: wq, wq_state: 1, ..write::ModifyWq::new_zeroed() };
            run(&extended_write_command(REPLY, write::MODIFY_WQ, change.as_bytes(), &[0; 8], 0, 0));
            let table =
                run(&extended_write_command(REPLY, write::CREATE_RWQ_IND_TBL, [0u32, 0, wq, 0].as_bytes(), &[], 16, 0))
                    [2];
            let core = write::ExtendedCreateQp {
                pd_handle: pd,
                qp_type: defs::QPT_RAW_PACKET as u8,
                comp_mask: write::CREATE_QP_MASK_IND_TABLE,
                rwq_ind_tbl_handle: table,
                ..write::ExtendedCreateQp::new_zeroed()
            };
            let rss = abi::CreateRssQp { rx_hash_function: 1, rx_key_len: 40, ..abi::CreateRssQp::new_zeroed() };
            let rss = run(&extended_write_command(REPLY, write::CREATE_QP, core.as_bytes(), rss.as_bytes(), 40, 40))[0];
            for slot in 0..u64::from(ENTRIES) {
                let address = BUFFERS + (at as u64 * u64::from(ENTRIES) + slot) * SLOT;
                let segment = [&(SLOT as u32).to_be_bytes()[..], &key.to_be_bytes(), &address.to_be_bytes()].concat();
                harness.poke(ring + 16 * slot, &segment);
            }
            harness.poke(posted, &ENTRIES.to_be_bytes());
            rss
        });
        Self {
            receivers,
            sender: qp[0],
            send_queue: qp[1],
            key,
            sent: 0,
            completed: 0,
            consumed: [0; RECEIVERS],
            harness,
        }
    }

    /// Executes a command in the ioctl form. Returns the handle attributes after the call and the outputs,
    /// both in order of the attributes.
    ///
    /// # Errors
    /// The errno that the kernel returns.
    pub fn ioctl(
        &self,
        object: u16,
        method: u16,
        attributes: &[(u16, AttributeValue)],
    ) -> Result<(Vec<u32>, Vec<Vec<u8>>), Errno> {
        let mut data_at = DATA;
        let list: Vec<Attribute> = attributes
            .iter()
            .map(|(id, value)| {
                let mut attribute = Attribute { attr_id: *id, flags: ioctl::MANDATORY, ..Attribute::new_zeroed() };
                match value {
                    AttributeValue::Handle(handle) => attribute.data = u64::from(*handle),
                    AttributeValue::Number(number) => (attribute.len, attribute.data) = (8, *number),
                    AttributeValue::Choice(choice, payload) => {
                        (attribute.elem_id, attribute.len, attribute.data) = (*choice, 2, u64::from(*payload));
                    }
                    AttributeValue::Bytes(bytes) if bytes.len() <= 8 => {
                        attribute.len = bytes.len() as u16;
                        attribute.data.as_mut_bytes()[..bytes.len()].copy_from_slice(bytes);
                    }
                    AttributeValue::Bytes(bytes) => {
                        (attribute.len, attribute.data) = (bytes.len() as u16, data_at);
                        self.harness.poke(data_at, bytes);
                        data_at += bytes.len() as u64;
                    }
                    AttributeValue::Room(length) => {
                        (attribute.len, attribute.data) = (*length as u16, data_at);
                        data_at += *length as u64;
                    }
                }
                attribute
            })
            .collect();
        let header = Header {
            length: (size_of::<Header>() + list.len() * size_of::<Attribute>()) as u16,
            object_id: object,
            method_id: method,
            num_attrs: list.len() as u16,
            driver_id: defs::DRIVER_MLX5,
            ..Header::new_zeroed()
        };
        self.harness.poke(COMMAND, &[header.as_bytes(), list.as_bytes()].concat());
        self.harness.emulator.ioctl(self.harness.fd, ioctl::REQUEST, COMMAND)?;
        let attribute_at = |at: usize| COMMAND + (size_of::<Header>() + at * size_of::<Attribute>()) as u64;
        let mut handles = Vec::new();
        let mut rooms = Vec::new();
        for (at, (_, value)) in attributes.iter().enumerate() {
            match value {
                AttributeValue::Handle(_) => {
                    let bytes = self.harness.peek(attribute_at(at) + 8, 4);
                    handles.push(u32::from_ne_bytes(bytes.try_into().expect("four bytes")));
                }
                AttributeValue::Room(length) => rooms.push(self.harness.peek(list[at].data, *length)),
                _ => {}
            }
        }
        Ok((handles, rooms))
    }

    /// Creates an object; returns its handle, which is the first attribute.
    ///
    /// # Errors
    /// The errno that the kernel returns.
    pub fn create(
        &self,
        object: u16,
        method: u16,
        id: u16,
        attributes: &[(u16, AttributeValue)],
    ) -> Result<u32, Errno> {
        let all = [&[(id, AttributeValue::Handle(0))][..], attributes].concat();
        self.ioctl(object, method, &all).map(|(handles, _)| handles[0])
    }

    /// Creates a matcher of direct verbs.
    ///
    /// # Errors
    /// The errno that the kernel returns.
    pub fn matcher(&self, table: u8, priority: u16, criteria: u8, mask: &[u8]) -> Result<u32, Errno> {
        let attributes = [
            (abi::MATCHER_MASK, AttributeValue::Bytes(mask.to_vec())),
            (abi::MATCHER_FLOW_TYPE, AttributeValue::Choice(0, priority)),
            (abi::MATCHER_CRITERIA, AttributeValue::Bytes(vec![criteria])),
            (abi::MATCHER_TABLE, AttributeValue::Number(u64::from(table))),
        ];
        self.create(abi::OBJECT_FLOW_MATCHER, abi::MATCHER_CREATE, abi::MATCHER_HANDLE, &attributes)
    }

    /// Creates a rule of direct verbs, with additional attributes.
    ///
    /// # Errors
    /// The errno that the kernel returns.
    pub fn flow(&self, matcher: u32, value: &[u8], more: &[(u16, AttributeValue)]) -> Result<u32, Errno> {
        let attributes = [
            &[
                (abi::FLOW_VALUE, AttributeValue::Bytes(value.to_vec())),
                (abi::FLOW_MATCHER, AttributeValue::Handle(matcher)),
            ][..],
            more,
        ]
        .concat();
        self.create(ioctl::OBJECT_FLOW, abi::FLOW_CREATE, abi::FLOW_HANDLE, &attributes)
    }

    /// Creates a rule of `ibv_create_flow` in the write form. `specs` has the kernel's layout.
    ///
    /// # Errors
    /// The errno that the kernel returns.
    pub fn verbs_flow(&self, qp: u32, attribute: [u8; 16], specs: &[u8]) -> Result<u32, Errno> {
        let mut attribute = attribute;
        attribute[4..6].copy_from_slice(&(specs.len() as u16).to_ne_bytes());
        let core = write::CreateFlow { comp_mask: 0, qp_handle: qp, flow_attr: attribute };
        let command =
            extended_write_command(REPLY, write::CREATE_FLOW, &[core.as_bytes(), specs].concat(), &[0; 8], 8, 0);
        self.harness.write(COMMAND, &command)?;
        Ok(u32::from_ne_bytes(self.harness.peek(REPLY + 4, 4).try_into().expect("four bytes")))
    }

    /// Posts a descriptor of `blocks` basic blocks. With `corrected` its index and queue number are corrected,
    /// otherwise it stays as it is.
    pub fn post(&mut self, descriptor: &[u8], blocks: u32, corrected: bool) {
        let first = self.write(descriptor, blocks, corrected);
        self.ring(first);
    }

    /// Writes a descriptor to the ring; returns the value for the doorbell register.
    fn write(&mut self, descriptor: &[u8], blocks: u32, corrected: bool) -> u64 {
        let mut bytes = descriptor.to_vec();
        bytes.resize(bytes.len().clamp(16, (ENTRIES as usize - 1) * 64), 0);
        if corrected {
            bytes[1..3].copy_from_slice(&(self.sent as u16).to_be_bytes());
            bytes[4..7].copy_from_slice(&self.send_queue.to_be_bytes()[1..]);
        }
        let start = u64::from(self.sent % ENTRIES) * 64;
        let (front, back) = bytes.split_at(bytes.len().min((u64::from(ENTRIES) * 64 - start) as usize));
        self.harness.poke(SEND_RING + start, front);
        self.harness.poke(SEND_RING, back);
        self.sent = self.sent.wrapping_add(blocks);
        u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"))
    }

    /// Rings the doorbell for all written descriptors; `first` are the first words of the last one.
    fn ring(&mut self, first: u64) {
        let record = RECORDS + 64 + 4 * RECORD_SEND as u64;
        self.harness.poke(record, &(self.sent & 0xffff).to_be_bytes());
        self.harness.ring_doorbell(UAR_BLUE_FLAME, first);
        // The driver consumes all completions.
        while self.completion(SEND_CQ, self.completed).is_some() {
            self.completed = self.completed.wrapping_add(1);
        }
        self.harness.poke(RECORDS, &(self.completed & 0xff_ffff).to_be_bytes());
    }

    /// Overwrites a receive descriptor, posted or not.
    pub fn overwrite_rx_wqe(&self, receiver: usize, slot: u32, descriptor: &[u8]) {
        let ring = RECEIVE + 0x2000 * (receiver % RECEIVERS) as u64;
        let bytes = &descriptor[..descriptor.len().min(16)];
        self.harness.poke(ring + 16 * u64::from(slot % ENTRIES), bytes);
    }

    /// Overwrites the send buffers.
    pub fn fill(&self, bytes: &[u8]) {
        self.harness.poke(SEND_BUFFER, &bytes[..bytes.len().min(0x2000)]);
    }

    /// Resets the send queue, as a driver does after an error.
    pub fn restart(&mut self) {
        let reset = write::ModifyQp { qp_handle: self.sender, attr_mask: 1, ..write::ModifyQp::new_zeroed() };
        let reset = write_command(write::MODIFY_QP, reset.as_bytes(), &[], 0);
        for change in std::iter::once(reset).chain(ready(self.sender)) {
            self.harness.write(COMMAND, &change).expect("a queue pair goes from any state to any other over reset");
        }
        self.sent = 0;
    }

    /// Adds a rule with which the first receiver gets every packet that no other rule matches.
    ///
    /// # Panics
    /// If the rule exists already.
    pub fn receive_everything(&self) {
        let mut everything = [0; 16];
        everything[..4].copy_from_slice(&1u32.to_ne_bytes());
        // The port number.
        everything[11] = 1;
        self.verbs_flow(self.receivers[0], everything, &[]).expect("a rule for everything");
    }

    /// Sends a frame; the link loops it back.
    pub fn send(&mut self, frame: &[u8]) {
        self.send_together(&[frame]);
    }

    /// Sends frames with one doorbell; the link loops them back in order.
    ///
    /// # Panics
    /// If there are no frames, or as many as the ring has entries.
    pub fn send_together(&mut self, frames: &[&[u8]]) {
        assert!((1..ENTRIES as usize).contains(&frames.len()));
        let mut first = 0;
        for (frame, at) in frames.iter().zip((SEND_BUFFER..).step_by(SLOT as usize)) {
            self.harness.poke(at, frame);
            let words = [
                (self.sent & 0xffff) << 8 | 0x0a,
                self.send_queue << 8 | 3,
                8,
                0,
                0,
                0,
                0,
                0,
                frame.len() as u32,
                self.key,
                (at >> 32) as u32,
                at as u32,
            ];
            let descriptor: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
            first = self.write(&descriptor, 1, false);
        }
        self.ring(first);
    }

    /// Returns an entry of a completion queue if the device has written it.
    fn completion(&self, ring: u64, at: u32) -> Option<Vec<u8>> {
        let entry = self.harness.peek(ring + u64::from(at % ENTRIES) * CQE_BYTES as u64, CQE_BYTES);
        let owner = CqeOwner(entry[CQE_OWNER]);
        (owner.opcode() < CQE_INVALID && u32::from(owner.owner()) == (at / ENTRIES) & 1).then_some(entry)
    }

    /// Returns the syndromes of the next consecutive error completions of a receiver.
    pub fn error_syndromes(&self, receiver: usize) -> Vec<u8> {
        let receiver = receiver % RECEIVERS;
        let ring = RECEIVE + 0x2000 * receiver as u64 + 0x1000;
        (0..ENTRIES)
            .map_while(|behind| self.completion(ring, self.consumed[receiver].wrapping_add(behind)))
            .take_while(|entry| CqeOwner(entry[CQE_OWNER]).opcode() == CQE_RESPONDER_ERROR)
            .map(|entry| entry[0x37])
            .collect()
    }

    /// Returns the packets that were received since the last call.
    pub fn arrivals(&mut self) -> Vec<ReceivedPacket> {
        let mut arrivals = Vec::new();
        for receiver in 0..RECEIVERS {
            let completions = RECEIVE + 0x2000 * receiver as u64 + 0x1000;
            while let Some(entry) = self.completion(completions, self.consumed[receiver]) {
                let at = self.consumed[receiver];
                let word = |at: usize| u32::from_be_bytes(entry[at..at + 4].try_into().expect("four bytes"));
                if CqeOwner(entry[CQE_OWNER]).opcode() != CQE_RESPONDER_SEND {
                    break;
                }
                let slot = receiver as u64 * u64::from(ENTRIES) + u64::from(at % ENTRIES);
                let frame = self.harness.peek(BUFFERS + slot * SLOT, (word(0x2c) as u64).min(SLOT) as usize);
                let (tag, metadata, cqe) = (word(0x38) & 0xff_ffff, word(0x24), entry[..0x30].to_vec());
                arrivals.push(ReceivedPacket { receiver, tag, metadata, frame, cqe });
                self.consumed[receiver] = at.wrapping_add(1);
                let record = |number: u64| RECORDS + 64 * (number + 2 * receiver as u64);
                self.harness.poke(record(2), &(self.consumed[receiver] & 0xff_ffff).to_be_bytes());
                self.harness.poke(record(3), &((self.consumed[receiver] + ENTRIES) & 0xffff).to_be_bytes());
            }
        }
        arrivals
    }
}
