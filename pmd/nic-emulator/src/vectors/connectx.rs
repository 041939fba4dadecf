//! An emulated ConnectX on vectors, set up as far as rules and packets: a send queue over a looped link, and queue pairs that receive.

use rustix::io::Errno;
use wirepath_nic_defs::mlx5::{
    CQE_BYTES, CQE_INVALID, CQE_OWNER, CQE_RESPONDER_ERROR, CQE_RESPONDER_SEND, CqeOwner, RECORD_SEND, UAR_BLUE_FLAME,
};
use wirepath_nic_defs::uverbs::ioctl::{self, Attribute, Header};
use wirepath_nic_defs::uverbs::{self as defs, mlx5 as abi, write};
use zerocopy::{FromZeros, IntoBytes};

use super::{BASE, Bench, extended, plain};

/// Commands, attributes behind them, and replies.
const COMMAND: u64 = BASE;
const DATA: u64 = BASE + 0x1000;
/// Where replies of the write form are expected.
pub(super) const REPLY: u64 = BASE + 0x4000;
/// Doorbell records.
const RECORDS: u64 = BASE + 0x5000;
const SEND_RING: u64 = BASE + 0x6000;
const SEND_CQ: u64 = BASE + 0x7000;
/// Ring and completions of each receiver.
const RECEIVE: u64 = BASE + 0x8000;
/// Memory that is sent.
pub const SEND_BUFFER: u64 = BASE + 0x2_0000;
const BUFFERS: u64 = BASE + 0x4_0000;

/// Entries of every ring.
const ENTRIES: u32 = 64;
/// Bytes of a receive buffer.
const SLOT: u64 = 2048;
/// Queue pairs that receive.
pub const RECEIVERS: usize = 2;

/// Value of an attribute of a command in the ioctl form.
#[derive(Clone, Debug)]
pub enum Value {
    /// Handle of an object, or room for a new one.
    Handle(u32),
    /// A constant.
    Number(u64),
    /// Bytes.
    Bytes(Vec<u8>),
    /// Choice of an enumeration, with a payload of two bytes.
    Choice(u8, u16),
    /// So many bytes that are written.
    Room(usize),
}

/// A packet that arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Which receiver.
    pub receiver: usize,
    /// Flow tag.
    pub tag: u32,
    /// Register B.
    pub metadata: u32,
    /// What was written.
    pub frame: Vec<u8>,
    /// The completion up to its time stamp.
    pub told: Vec<u8>,
}

/// The device.
#[derive(Debug)]
pub struct Connectx {
    /// Emulator and memory.
    pub bench: Bench,
    /// Handles of queue pairs that receive.
    pub receivers: [u32; RECEIVERS],
    /// Handle of the queue pair that sends.
    pub sender: u32,
    send_queue: u32,
    /// Key of all memory that is registered.
    pub key: u32,
    sent: u32,
    completed: u32,
    seen: [u32; RECEIVERS],
}

/// Commands that make a queue pair send, from reset on.
fn ready(qp: u32) -> impl Iterator<Item = Vec<u8>> {
    [(1, 0x21), (2, 1), (3, 1)].into_iter().map(move |(state, mask)| {
        let change = write::ModifyQp {
            qp_handle: qp,
            attr_mask: mask,
            qp_state: state,
            port_num: 1,
            ..write::ModifyQp::new_zeroed()
        };
        plain(write::MODIFY_QP, change.as_bytes(), &[], 0)
    })
}

impl Connectx {
    /// With keys of `[[device]]`, such as `steering = { devx = true }`.
    ///
    /// # Panics
    /// If it cannot be set up.
    pub fn new(keys: &str) -> Self {
        let bench =
            Bench::new(&format!("[[device]]\nkind = 'mlx5'\n{keys}\n[[device.port]]\nlink = 'loop'\nmtu = 1600\n"));
        let run = |command: &[u8]| -> Vec<u32> {
            bench.write(COMMAND, command).unwrap_or_else(|errno| panic!("{errno}: {:?}", bench.emulator.log().last()));
            bench.peek(REPLY, 64).chunks(4).map(|word| u32::from_ne_bytes(word.try_into().expect("four"))).collect()
        };
        let devx = keys.contains("devx = true");
        let context = abi::GetContext {
            total_num_bfregs: 16,
            num_low_latency_bfregs: 4,
            flags: if devx { abi::CONTEXT_DEVX } else { 0 },
            max_cqe_version: 1,
            ..abi::GetContext::new_zeroed()
        };
        run(&plain(write::GET_CONTEXT, REPLY.as_bytes(), context.as_bytes(), 8 + 72));
        let pd = run(&plain(write::ALLOC_PD, REPLY.as_bytes(), &[], 8))[0];
        let length = RECEIVERS as u64 * u64::from(ENTRIES) * SLOT + BUFFERS - SEND_BUFFER;
        let mr = write::RegMr {
            response: REPLY,
            start: SEND_BUFFER,
            length,
            hca_va: SEND_BUFFER,
            pd_handle: pd,
            access_flags: defs::ACCESS_LOCAL_WRITE,
        };
        let key = run(&plain(write::REG_MR, mr.as_bytes(), &[], 12))[1];
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
            // Entries that were never written have an opcode that says so.
            bench.poke(ring, &[0xf0; 64 * CQE_BYTES]);
            run(&plain(write::CREATE_CQ, core.as_bytes(), driver.as_bytes(), 16))[0]
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
        let qp = run(&plain(write::CREATE_QP, core.as_bytes(), driver.as_bytes(), 32 + 40));
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
            let wq = run(&extended(REPLY, write::CREATE_WQ, core.as_bytes(), driver.as_bytes(), 24, 8))[2];
            let change = write::ModifyWq { attr_mask: 1, wq_handle: wq, wq_state: 1, ..write::ModifyWq::new_zeroed() };
            run(&extended(REPLY, write::MODIFY_WQ, change.as_bytes(), &[0; 8], 0, 0));
            let table = run(&extended(REPLY, write::CREATE_RWQ_IND_TBL, [0u32, 0, wq, 0].as_bytes(), &[], 16, 0))[2];
            let core = write::ExtendedCreateQp {
                pd_handle: pd,
                qp_type: defs::QPT_RAW_PACKET as u8,
                comp_mask: write::CREATE_QP_MASK_IND_TABLE,
                rwq_ind_tbl_handle: table,
                ..write::ExtendedCreateQp::new_zeroed()
            };
            let rss = abi::CreateRssQp { rx_hash_function: 1, rx_key_len: 40, ..abi::CreateRssQp::new_zeroed() };
            let rss = run(&extended(REPLY, write::CREATE_QP, core.as_bytes(), rss.as_bytes(), 40, 40))[0];
            for slot in 0..u64::from(ENTRIES) {
                let address = BUFFERS + (at as u64 * u64::from(ENTRIES) + slot) * SLOT;
                let segment = [&(SLOT as u32).to_be_bytes()[..], &key.to_be_bytes(), &address.to_be_bytes()].concat();
                bench.poke(ring + 16 * slot, &segment);
            }
            bench.poke(posted, &ENTRIES.to_be_bytes());
            rss
        });
        Self { receivers, sender: qp[0], send_queue: qp[1], key, sent: 0, completed: 0, seen: [0; RECEIVERS], bench }
    }

    /// A command in the ioctl form: what stands in its handle attributes afterwards, and its rooms, in their order.
    ///
    /// # Errors
    /// As the kernel's.
    pub fn ioctl(
        &self,
        object: u16,
        method: u16,
        attributes: &[(u16, Value)],
    ) -> Result<(Vec<u32>, Vec<Vec<u8>>), Errno> {
        let mut data_at = DATA;
        let list: Vec<Attribute> = attributes
            .iter()
            .map(|(id, value)| {
                let mut attribute = Attribute { attr_id: *id, flags: ioctl::MANDATORY, ..Attribute::new_zeroed() };
                match value {
                    Value::Handle(handle) => attribute.data = u64::from(*handle),
                    Value::Number(number) => (attribute.len, attribute.data) = (8, *number),
                    Value::Choice(choice, payload) => {
                        (attribute.elem_id, attribute.len, attribute.data) = (*choice, 2, u64::from(*payload));
                    }
                    Value::Bytes(bytes) if bytes.len() <= 8 => {
                        attribute.len = bytes.len() as u16;
                        attribute.data.as_mut_bytes()[..bytes.len()].copy_from_slice(bytes);
                    }
                    Value::Bytes(bytes) => {
                        (attribute.len, attribute.data) = (bytes.len() as u16, data_at);
                        self.bench.poke(data_at, bytes);
                        data_at += bytes.len() as u64;
                    }
                    Value::Room(length) => {
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
        self.bench.poke(COMMAND, &[header.as_bytes(), list.as_bytes()].concat());
        self.bench.emulator.ioctl(self.bench.fd, ioctl::REQUEST, COMMAND)?;
        let attribute_at = |at: usize| COMMAND + (size_of::<Header>() + at * size_of::<Attribute>()) as u64;
        let mut handles = Vec::new();
        let mut rooms = Vec::new();
        for (at, (_, value)) in attributes.iter().enumerate() {
            match value {
                Value::Handle(_) => {
                    let bytes = self.bench.peek(attribute_at(at) + 8, 4);
                    handles.push(u32::from_ne_bytes(bytes.try_into().expect("four bytes")));
                }
                Value::Room(length) => rooms.push(self.bench.peek(list[at].data, *length)),
                _ => {}
            }
        }
        Ok((handles, rooms))
    }

    /// A new object: its handle, which stands in the first attribute.
    ///
    /// # Errors
    /// As the kernel's.
    pub fn create(&self, object: u16, method: u16, id: u16, attributes: &[(u16, Value)]) -> Result<u32, Errno> {
        let all = [&[(id, Value::Handle(0))][..], attributes].concat();
        self.ioctl(object, method, &all).map(|(handles, _)| handles[0])
    }

    /// A matcher of direct verbs.
    ///
    /// # Errors
    /// As the kernel's.
    pub fn matcher(&self, table: u8, priority: u16, criteria: u8, mask: &[u8]) -> Result<u32, Errno> {
        let attributes = [
            (abi::MATCHER_MASK, Value::Bytes(mask.to_vec())),
            (abi::MATCHER_FLOW_TYPE, Value::Choice(0, priority)),
            (abi::MATCHER_CRITERIA, Value::Bytes(vec![criteria])),
            (abi::MATCHER_TABLE, Value::Number(u64::from(table))),
        ];
        self.create(abi::OBJECT_FLOW_MATCHER, abi::MATCHER_CREATE, abi::MATCHER_HANDLE, &attributes)
    }

    /// A rule of direct verbs, with further attributes.
    ///
    /// # Errors
    /// As the kernel's.
    pub fn flow(&self, matcher: u32, value: &[u8], more: &[(u16, Value)]) -> Result<u32, Errno> {
        let attributes =
            [&[(abi::FLOW_VALUE, Value::Bytes(value.to_vec())), (abi::FLOW_MATCHER, Value::Handle(matcher))][..], more]
                .concat();
        self.create(ioctl::OBJECT_FLOW, abi::FLOW_CREATE, abi::FLOW_HANDLE, &attributes)
    }

    /// A rule of `ibv_create_flow`, in the write form; specs as the kernel has them.
    ///
    /// # Errors
    /// As the kernel's.
    pub fn verbs_flow(&self, qp: u32, attribute: [u8; 16], specs: &[u8]) -> Result<u32, Errno> {
        let mut attribute = attribute;
        attribute[4..6].copy_from_slice(&(specs.len() as u16).to_ne_bytes());
        let core = write::CreateFlow { comp_mask: 0, qp_handle: qp, flow_attr: attribute };
        let command = extended(REPLY, write::CREATE_FLOW, &[core.as_bytes(), specs].concat(), &[0; 8], 8, 0);
        self.bench.write(COMMAND, &command)?;
        Ok(u32::from_ne_bytes(self.bench.peek(REPLY + 4, 4).try_into().expect("four bytes")))
    }

    /// Posts a descriptor of so many basic blocks, whatever it says; `honest`: with its right index and queue.
    pub fn post(&mut self, descriptor: &[u8], blocks: u32, honest: bool) {
        let first = self.write(descriptor, blocks, honest);
        self.ring(first);
    }

    /// Writes a descriptor behind the last one: what the register is told of it.
    fn write(&mut self, descriptor: &[u8], blocks: u32, honest: bool) -> u64 {
        let mut bytes = descriptor.to_vec();
        bytes.resize(bytes.len().clamp(16, (ENTRIES as usize - 1) * 64), 0);
        if honest {
            bytes[1..3].copy_from_slice(&(self.sent as u16).to_be_bytes());
            bytes[4..7].copy_from_slice(&self.send_queue.to_be_bytes()[1..]);
        }
        let start = u64::from(self.sent % ENTRIES) * 64;
        let (front, back) = bytes.split_at(bytes.len().min((u64::from(ENTRIES) * 64 - start) as usize));
        self.bench.poke(SEND_RING + start, front);
        self.bench.poke(SEND_RING, back);
        self.sent = self.sent.wrapping_add(blocks);
        u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"))
    }

    /// Tells of all descriptors that were written, of the last of them by its first words.
    fn ring(&mut self, first: u64) {
        let record = RECORDS + 64 + 4 * RECORD_SEND as u64;
        self.bench.poke(record, &(self.sent & 0xffff).to_be_bytes());
        self.bench.ring(UAR_BLUE_FLAME, first);
        // The driver has seen every completion.
        while self.completion(SEND_CQ, self.completed).is_some() {
            self.completed = self.completed.wrapping_add(1);
        }
        self.bench.poke(RECORDS, &(self.completed & 0xff_ffff).to_be_bytes());
    }

    /// Overwrites a receive descriptor, whether it is posted or not.
    pub fn spoil_receive(&self, receiver: usize, slot: u32, descriptor: &[u8]) {
        let ring = RECEIVE + 0x2000 * (receiver % RECEIVERS) as u64;
        let bytes = &descriptor[..descriptor.len().min(16)];
        self.bench.poke(ring + 16 * u64::from(slot % ENTRIES), bytes);
    }

    /// Overwrites the memory that is sent.
    pub fn fill(&self, bytes: &[u8]) {
        self.bench.poke(SEND_BUFFER, &bytes[..bytes.len().min(0x2000)]);
    }

    /// Starts the send queue anew, as after an error.
    pub fn restart(&mut self) {
        let reset = write::ModifyQp { qp_handle: self.sender, attr_mask: 1, ..write::ModifyQp::new_zeroed() };
        let reset = plain(write::MODIFY_QP, reset.as_bytes(), &[], 0);
        for change in std::iter::once(reset).chain(ready(self.sender)) {
            self.bench.write(COMMAND, &change).expect("a queue pair goes from any state to any other over reset");
        }
        self.sent = 0;
    }

    /// Has the first receiver take whatever no other rule wants.
    ///
    /// # Panics
    /// If it has been told before.
    pub fn receive_everything(&self) {
        let mut everything = [0; 16];
        everything[..4].copy_from_slice(&1u32.to_ne_bytes());
        // The port.
        everything[11] = 1;
        self.verbs_flow(self.receivers[0], everything, &[]).expect("a rule for everything");
    }

    /// Sends a frame, which the link brings back.
    pub fn send(&mut self, frame: &[u8]) {
        self.send_together(&[frame]);
    }

    /// Sends frames by one doorbell, fewer than the ring has entries: the link brings them back one behind the other.
    ///
    /// # Panics
    /// If there are none, or too many.
    pub fn send_together(&mut self, frames: &[&[u8]]) {
        assert!((1..ENTRIES as usize).contains(&frames.len()));
        let mut first = 0;
        for (frame, at) in frames.iter().zip((SEND_BUFFER..).step_by(SLOT as usize)) {
            self.bench.poke(at, frame);
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

    /// An entry of a completion queue, if the device has written it.
    fn completion(&self, ring: u64, at: u32) -> Option<Vec<u8>> {
        let entry = self.bench.peek(ring + u64::from(at % ENTRIES) * CQE_BYTES as u64, CQE_BYTES);
        let owner = CqeOwner(entry[CQE_OWNER]);
        (owner.opcode() < CQE_INVALID && u32::from(owner.owner()) == (at / ENTRIES) & 1).then_some(entry)
    }

    /// Syndromes of a receiver's completions from the next on, as far as they are of errors.
    pub fn failures(&self, receiver: usize) -> Vec<u8> {
        let receiver = receiver % RECEIVERS;
        let ring = RECEIVE + 0x2000 * receiver as u64 + 0x1000;
        (0..ENTRIES)
            .map_while(|behind| self.completion(ring, self.seen[receiver].wrapping_add(behind)))
            .take_while(|entry| CqeOwner(entry[CQE_OWNER]).opcode() == CQE_RESPONDER_ERROR)
            .map(|entry| entry[0x37])
            .collect()
    }

    /// What arrived since the last time.
    pub fn arrivals(&mut self) -> Vec<Arrival> {
        let mut arrivals = Vec::new();
        for receiver in 0..RECEIVERS {
            let completions = RECEIVE + 0x2000 * receiver as u64 + 0x1000;
            while let Some(entry) = self.completion(completions, self.seen[receiver]) {
                let at = self.seen[receiver];
                let word = |at: usize| u32::from_be_bytes(entry[at..at + 4].try_into().expect("four bytes"));
                if CqeOwner(entry[CQE_OWNER]).opcode() != CQE_RESPONDER_SEND {
                    break;
                }
                let slot = receiver as u64 * u64::from(ENTRIES) + u64::from(at % ENTRIES);
                let frame = self.bench.peek(BUFFERS + slot * SLOT, (word(0x2c) as u64).min(SLOT) as usize);
                let (tag, metadata, told) = (word(0x38) & 0xff_ffff, word(0x24), entry[..0x30].to_vec());
                arrivals.push(Arrival { receiver, tag, metadata, frame, told });
                self.seen[receiver] = at.wrapping_add(1);
                let record = |number: u64| RECORDS + 64 * (number + 2 * receiver as u64);
                self.bench.poke(record(2), &(self.seen[receiver] & 0xff_ffff).to_be_bytes());
                self.bench.poke(record(3), &((self.seen[receiver] + ENTRIES) & 0xffff).to_be_bytes());
            }
        }
        arrivals
    }
}
