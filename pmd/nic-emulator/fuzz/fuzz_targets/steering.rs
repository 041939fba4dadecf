//! Flow rules of an emulated ConnectX, and matching frames, in any order.
//!
//! A record consists of a kind (one byte), a length (two bytes) and that many bytes:
//!
//! - 0: a matcher (table, priority, criteria, mask)
//! - 1: a rule of a matcher (matcher, attributes, flow action, value)
//! - 2: a header modification (table, commands)
//! - 3: a packet reformat (kind, table, data)
//! - 4: a rule of `ibv_create_flow` (attribute of 16 bytes, specs)
//! - 5: a frame
//! - 6: destruction of the object with this index

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_nic_defs::uverbs::{ioctl, mlx5 as abi};
use wirepath_nic_emulator::mem_host::{AttributeValue, Connectx};

fn number(id: u16, value: u8) -> (u16, AttributeValue) {
    (id, AttributeValue::Number(u64::from(value)))
}

fuzz_target!(|data: &[u8]| {
    let mut nic = Connectx::new("steering = { devx = true, table_entries = 64 }");
    let mut objects: Vec<(u16, u32)> = Vec::new();
    let mut rest = data;
    while let Some((&[kind, low, high], tail)) = rest.split_first_chunk::<3>() {
        let length = usize::from(u16::from_le_bytes([low, high])).min(tail.len());
        let (bytes, next) = tail.split_at(length);
        rest = next;
        let handle =
            |which: u8, objects: &[(u16, u32)]| objects.get(usize::from(which)).map_or(0, |(_, handle)| *handle);
        let made = match (kind % 7, bytes) {
            (0, [table, priority, criteria, mask @ ..]) => {
                nic.matcher(*table, u16::from(*priority), *criteria, mask).map(|made| (abi::OBJECT_FLOW_MATCHER, made))
            }
            (1, [matcher, how, action, value @ ..]) => {
                let mut more = Vec::new();
                if how & 1 != 0 {
                    more.push((abi::FLOW_DEST_QP, AttributeValue::Handle(nic.receivers[usize::from(how >> 7)])));
                }
                if how & 6 != 0 {
                    more.push((abi::FLOW_FLAGS, AttributeValue::Bytes(vec![how >> 1 & 3, 0, 0, 0])));
                }
                if how & 8 != 0 {
                    more.push((abi::FLOW_TAG, AttributeValue::Bytes(vec![*how, *action, 0, 0])));
                }
                if how & 16 != 0 {
                    let action = handle(*action, &objects).to_ne_bytes().to_vec();
                    more.push((abi::FLOW_ACTIONS, AttributeValue::Bytes(action)));
                }
                nic.flow(handle(*matcher, &objects), value, &more).map(|made| (ioctl::OBJECT_FLOW, made))
            }
            (2, [table, commands @ ..]) => {
                let attributes = [
                    (abi::MODIFY_HEADER_COMMANDS, AttributeValue::Bytes(commands.to_vec())),
                    number(abi::MODIFY_HEADER_TABLE, *table),
                ];
                nic.create(ioctl::OBJECT_FLOW_ACTION, abi::ACTION_MODIFY_HEADER, 0x1000, &attributes)
                    .map(|made| (ioctl::OBJECT_FLOW_ACTION, made))
            }
            (3, [kind, table, data @ ..]) => {
                let mut attributes = vec![number(abi::REFORMAT_TYPE, *kind), number(abi::REFORMAT_TABLE, *table)];
                if !data.is_empty() {
                    attributes.push((abi::REFORMAT_DATA, AttributeValue::Bytes(data.to_vec())));
                }
                nic.create(ioctl::OBJECT_FLOW_ACTION, abi::ACTION_REFORMAT, 0x1000, &attributes)
                    .map(|made| (ioctl::OBJECT_FLOW_ACTION, made))
            }
            (4, bytes) if bytes.len() >= 16 => {
                let (attribute, specs) = bytes.split_at(16);
                let attribute = attribute.try_into().expect("sixteen bytes");
                nic.verbs_flow(nic.receivers[0], attribute, &specs[..specs.len() & !7])
                    .map(|made| (ioctl::OBJECT_FLOW, made))
            }
            (5, frame) => {
                nic.send(&frame[..frame.len().min(1600)]);
                for arrival in nic.arrivals() {
                    assert!(arrival.tag < 1 << 24 && arrival.frame.len() >= 14);
                }
                continue;
            }
            (6, [which, ..]) if usize::from(*which) < objects.len() => {
                let (object, handle) = objects[usize::from(*which)];
                let (method, id) = match object {
                    abi::OBJECT_FLOW_MATCHER => (abi::MATCHER_DESTROY, abi::MATCHER_DESTROY_HANDLE),
                    ioctl::OBJECT_FLOW => (ioctl::FLOW_DESTROY, 0),
                    _ => (ioctl::FLOW_ACTION_DESTROY, 0),
                };
                if nic.ioctl(object, method, &[(id, AttributeValue::Handle(handle))]).is_ok() {
                    objects.swap_remove(usize::from(*which));
                }
                continue;
            }
            _ => continue,
        };
        objects.extend(made);
    }
    nic.harness.emulator.counters();
});
