//! Functions that `verbs.h` defines inline and no library exports. They call the provider through the
//! operations of the context.
//!
//! Each behaves like its C counterpart, including return value and `errno`. Like these, all are unsafe:
//! pointers must refer to live objects of one context, and a destroyed object must not be used.

use std::ffi::c_int;
use std::mem::offset_of;

use libc::{EINVAL, ENOSYS, EOPNOTSUPP};

use super::*;

/// Value of `abi_compat` in a context that is part of a `verbs_context`: `__VERBS_ABI_IS_EXTENDED`.
const ABI_IS_EXTENDED: usize = usize::MAX;

/// Distances from `context`. A library's `verbs_context` may have more or fewer fields at its front than
/// ours.
const SIZE_BEFORE_CONTEXT: usize = offset_of!(verbs_context, context) - offset_of!(verbs_context, sz);
const CONTEXT_AND_AFTER: usize = size_of::<verbs_context>() - offset_of!(verbs_context, context);

/// Returns the operation that lies `before` bytes before the context, unless the library has none
/// (`verbs_get_ctx_op`).
///
/// # Safety
/// `context` is an open context. An `Option` of a function with type `F` lies `before` bytes before it in
/// `struct verbs_context`.
#[inline]
unsafe fn operation<F: Copy>(context: *mut ibv_context, before: usize) -> Option<F> {
    // SAFETY: the caller guarantees an open context. `abi_compat` shows that it is the last field of a
    // `verbs_context`. `sz` shows that the operation lies within it.
    unsafe {
        if (*context).abi_compat as usize != ABI_IS_EXTENDED {
            return None;
        }
        let size = context.byte_sub(SIZE_BEFORE_CONTEXT).cast::<usize>().read();
        if size < before + CONTEXT_AND_AFTER {
            return None;
        }
        context.byte_sub(before).cast::<Option<F>>().read()
    }
}

macro_rules! operation {
    ($context:expr, $name:ident) => {
        operation_of($context, offset_of!(verbs_context, context) - offset_of!(verbs_context, $name), |table| {
            table.$name
        })
    };
}

/// Returns an operation like [`operation`]. The type comes from the field.
///
/// # Safety
/// `context` is an open context. `field` returns the field that lies `before` bytes before `context` in
/// `struct verbs_context`.
#[inline]
unsafe fn operation_of<F: Copy>(
    context: *mut ibv_context,
    before: usize,
    field: fn(&verbs_context) -> Option<F>,
) -> Option<F> {
    let _ = field;
    // SAFETY: the caller guarantees an open context and a field of type `Option<F>` at that distance.
    unsafe { operation(context, before) }
}

fn set_errno(value: c_int) {
    // SAFETY: `__errno_location` returns the address of this thread's errno.
    unsafe { *libc::__errno_location() = value };
}

/// Sets `errno` to `EOPNOTSUPP` and returns a null pointer, for a provider without the operation.
fn not_supported<T>() -> *mut T {
    set_errno(EOPNOTSUPP);
    std::ptr::null_mut()
}

/// Declares functions that forward to one operation. Without the operation, functions for objects return null
/// with `EOPNOTSUPP` in `errno`; the others return `EOPNOTSUPP`.
macro_rules! forwarded {
    ($($(#[$meta:meta])* $kind:ident $function:ident($first:ident: $first_type:ty $(, $argument:ident: $type:ty)*)
        -> $result:ty
        = $context:expr => $operation:ident;)*) => {$(
        $(#[$meta])*
        /// # Safety
        /// The contract of the C function applies: all pointers refer to live objects of one context.
        #[inline]
        pub unsafe fn $function($first: $first_type $(, $argument: $type)*) -> $result {
            // SAFETY: the caller guarantees live objects of one open context, whose provider implements the
            // operation for them.
            unsafe {
                match operation!($context, $operation) {
                    Some(function) => function($first $(, $argument)*),
                    None => forwarded!(@$kind),
                }
            }
        }
    )*};
    (@object) => { not_supported() };
    (@status) => { EOPNOTSUPP };
}

forwarded! {
    object ibv_create_flow(qp: *mut ibv_qp, flow: *mut ibv_flow_attr) -> *mut ibv_flow
        = (*qp).context => ibv_create_flow;
    status ibv_destroy_flow(flow: *mut ibv_flow) -> c_int = (*flow).context => ibv_destroy_flow;
    object ibv_create_flow_action_esp(context: *mut ibv_context, attr: *mut ibv_flow_action_esp_attr)
        -> *mut ibv_flow_action
        = context => create_flow_action_esp;
    status ibv_destroy_flow_action(action: *mut ibv_flow_action) -> c_int = (*action).context => destroy_flow_action;
    object ibv_create_counters(context: *mut ibv_context, attr: *mut ibv_counters_init_attr) -> *mut ibv_counters
        = context => create_counters;
    status ibv_destroy_counters(counters: *mut ibv_counters) -> c_int = (*counters).context => destroy_counters;
    status ibv_attach_counters_point_flow(counters: *mut ibv_counters, attr: *mut ibv_counter_attach_attr,
        flow: *mut ibv_flow) -> c_int
        = (*counters).context => attach_counters_point_flow;
    status ibv_read_counters(counters: *mut ibv_counters, values: *mut u64, count: u32, flags: u32) -> c_int
        = (*counters).context => read_counters;
    object ibv_alloc_td(context: *mut ibv_context, attr: *mut ibv_td_init_attr) -> *mut ibv_td = context => alloc_td;
    status ibv_dealloc_td(td: *mut ibv_td) -> c_int = (*td).context => dealloc_td;
    object ibv_alloc_parent_domain(context: *mut ibv_context, attr: *mut ibv_parent_domain_init_attr) -> *mut ibv_pd
        = context => alloc_parent_domain;
    status ibv_query_rt_values_ex(context: *mut ibv_context, values: *mut ibv_values_ex) -> c_int
        = context => query_rt_values;
    object ibv_create_cq_ex(context: *mut ibv_context, attr: *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex
        = context => create_cq_ex;
    status ibv_modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int = (*cq).context => modify_cq;
    status ibv_modify_wq(wq: *mut ibv_wq, attr: *mut ibv_wq_attr) -> c_int = (*wq).context => modify_wq;
    status ibv_destroy_wq(wq: *mut ibv_wq) -> c_int = (*wq).context => destroy_wq;
    object ibv_create_rwq_ind_table(context: *mut ibv_context, attr: *mut ibv_rwq_ind_table_init_attr)
        -> *mut ibv_rwq_ind_table
        = context => create_rwq_ind_table;
    status ibv_destroy_rwq_ind_table(table: *mut ibv_rwq_ind_table) -> c_int
        = (*table).context => destroy_rwq_ind_table;
    /// Needs more bits in `comp_mask` than `IBV_QP_INIT_ATTR_PD`. Use `ibv_create_qp` for queue pairs without
    /// them.
    object ibv_create_qp_ex(context: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp
        = context => create_qp_ex;
}

/// Creates a work queue and initialises the fields that libibverbs owns. In C the inline function does this
/// too, not the provider.
///
/// # Safety
/// The contract of the C function applies: `context` is an open context, and `attr` and the objects that it
/// names are live.
pub unsafe fn ibv_create_wq(context: *mut ibv_context, attr: *mut ibv_wq_init_attr) -> *mut ibv_wq {
    // SAFETY: the caller guarantees an open context and live attributes. No one else refers to the new work
    // queue yet.
    unsafe {
        let Some(create) = operation!(context, create_wq) else { return not_supported() };
        let wq = create(context, attr);
        if !wq.is_null() {
            (*wq).wq_context = (*attr).wq_context;
            (*wq).events_completed = 0;
            libc::pthread_mutex_init(&raw mut (*wq).mutex, std::ptr::null());
            libc::pthread_cond_init(&raw mut (*wq).cond, std::ptr::null());
        }
        wq
    }
}

/// Queries the attributes of the device. Returns `None` if the provider has only `ibv_query_device`: the
/// caller then stores its result in `orig_attr`.
///
/// # Safety
/// `context` is an open context, `input` is null or live, and `attr` is valid for writes.
pub unsafe fn ibv_query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
) -> Option<c_int> {
    // SAFETY: the caller guarantees an open context and valid pointers. The provider gets the size of `attr`.
    unsafe {
        if !input.is_null() && (*input).comp_mask != 0 {
            return Some(EINVAL);
        }
        let query = operation!(context, query_device_ex)?;
        match query(context, input, attr, size_of::<ibv_device_attr_ex>()) {
            EOPNOTSUPP | ENOSYS => None,
            result => Some(result),
        }
    }
}

/// Queries the attributes of a port, as the C macro `ibv_query_port` does. The exported function of that name
/// fills only the first 44 bytes. Returns `None` with a zeroed `attr` if only that function is available.
///
/// # Safety
/// `context` is an open context, and `attr` is valid for writes.
pub unsafe fn ibv_query_port_ex(context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> Option<c_int> {
    // SAFETY: the caller guarantees an open context and a writable `attr`. The provider gets the size of
    // `attr`.
    unsafe {
        attr.write(ibv_port_attr::zeroed());
        let query = operation!(context, query_port)?;
        Some(query(context, port, attr, size_of::<ibv_port_attr>()))
    }
}

/// Polls up to `entries` completions. Returns their number, or a negative value on failure.
///
/// # Safety
/// `cq` is live, and `wc` is valid for writes of `entries` completions.
#[inline]
pub unsafe fn ibv_poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the caller guarantees a live queue and room for the completions. Every context has this
    // operation; the default one fails.
    unsafe { (*(*cq).context).ops.poll_cq.map_or(-EOPNOTSUPP, |poll| poll(cq, entries, wc)) }
}

/// Requests an event at the next completion.
///
/// # Safety
/// `cq` is live.
#[inline]
pub unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the caller guarantees a live queue.
    unsafe { (*(*cq).context).ops.req_notify_cq.map_or(EOPNOTSUPP, |request| request(cq, solicited_only)) }
}

/// Posts send requests.
///
/// # Safety
/// `qp` is live, and `wr` is a chain of requests. Their buffers stay registered until the requests complete.
/// `bad` is valid for writes.
#[inline]
pub unsafe fn ibv_post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
    // SAFETY: the caller guarantees a live queue pair, a valid chain of requests and registered buffers.
    unsafe { (*(*qp).context).ops.post_send.map_or(EOPNOTSUPP, |post| post(qp, wr, bad)) }
}

/// Posts receive requests to a work queue.
///
/// # Safety
/// `wq` is live, and `wr` is a chain of requests. Their buffers stay registered until the requests complete.
/// `bad` is valid for writes.
#[inline]
pub unsafe fn ibv_post_wq_recv(wq: *mut ibv_wq, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: the caller guarantees a live work queue, a valid chain of requests and registered buffers.
    unsafe { (*wq).post_recv.map_or(EOPNOTSUPP, |post| post(wq, wr, bad)) }
}

/// Returns addresses of operations that only providers implement. They identify the provider of a context.
///
/// # Safety
/// `context` is an open context.
pub unsafe fn provider_operations(context: *mut ibv_context) -> impl Iterator<Item = *const ()> {
    // SAFETY: the caller guarantees an open context. The operations are only compared, not called.
    let operations = unsafe {
        [
            operation!(context, create_wq).map(|function| function as *const ()),
            operation!(context, alloc_parent_domain).map(|function| function as *const ()),
            operation!(context, create_qp_ex).map(|function| function as *const ()),
            operation!(context, query_device_ex).map(|function| function as *const ()),
            (*context).ops.poll_cq.map(|function| function as *const ()),
        ]
    };
    operations.into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn no_flow(_: *mut ibv_flow) -> c_int {
        7
    }

    unsafe extern "C" fn long_answer(_: *mut ibv_context, _: u8, _: *mut ibv_port_attr, size: usize) -> c_int {
        size as c_int
    }

    /// Builds a table as libibverbs allocates it. Newer versions have more fields at its front.
    fn table() -> Box<verbs_context> {
        let mut table = Box::new(verbs_context::zeroed());
        table.sz = size_of::<verbs_context>();
        table.context.abi_compat = ABI_IS_EXTENDED as *mut _;
        table
    }

    #[test]
    fn operations_in_front_of_the_context_are_called() {
        let mut table = table();
        table.ibv_destroy_flow = Some(no_flow);
        table.query_port = Some(long_answer);
        let context = &raw mut table.context;
        let mut flow = ibv_flow::zeroed();
        flow.context = context;
        let mut port = ibv_port_attr::zeroed();
        // SAFETY: the context is part of a zeroed `verbs_context` with the right `sz`, and its operations
        // match their types.
        unsafe {
            assert_eq!(ibv_destroy_flow(&raw mut flow), 7);
            assert_eq!(ibv_query_port_ex(context, 1, &raw mut port), Some(size_of::<ibv_port_attr>() as c_int));
            assert_eq!(provider_operations(context).count(), 0);
        }
    }

    #[test]
    fn operations_missing_from_an_old_library_are_not_read() {
        let mut table = table();
        table.query_port = Some(long_answer);
        table.ibv_destroy_flow = Some(no_flow);
        // The library's table starts right after `query_port`.
        table.sz = size_of::<verbs_context>() - size_of::<usize>();
        let context = &raw mut table.context;
        let mut flow = ibv_flow::zeroed();
        flow.context = context;
        let mut port = ibv_port_attr::zeroed();
        // SAFETY: the context is part of a zeroed `verbs_context` with an `sz` within it, and its operations
        // match their types.
        unsafe {
            assert_eq!(ibv_query_port_ex(context, 1, &raw mut port), None);
            assert_eq!(ibv_destroy_flow(&raw mut flow), 7);
            table.context.abi_compat = std::ptr::null_mut();
            assert_eq!(ibv_destroy_flow(&raw mut flow), EOPNOTSUPP);
        }
    }

    #[test]
    fn a_missing_operation_sets_errno() {
        let mut table = table();
        let context = &raw mut table.context;
        set_errno(0);
        let mut wanted = ibv_wq_init_attr::zeroed();
        // SAFETY: the context is part of a zeroed `verbs_context` with the right `sz`, and all pointers are
        // live.
        unsafe {
            assert!(ibv_create_wq(context, &raw mut wanted).is_null());
            assert_eq!(*libc::__errno_location(), EOPNOTSUPP);
            let mut input = ibv_query_device_ex_input::zeroed();
            let mut attr = ibv_device_attr_ex::zeroed();
            assert_eq!(ibv_query_device_ex(context, &raw const input, &raw mut attr), None);
            input.comp_mask = 1;
            assert_eq!(ibv_query_device_ex(context, &raw const input, &raw mut attr), Some(EINVAL));
        }
    }
}
