// Browsers refuse workers to pages opened as files. There the search runs in a hidden frame instead.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const scope = frame.contentWindow
      scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const load = address => new Promise((resolve, reject) => {
        const script = scope.document.createElement("script")
        script.src = address
        script.onload = resolve
        script.onerror = reject
        scope.document.head.append(script)
      })
      scope.importScripts = (...addresses) => Promise.all(addresses.map(load))
      this.scope = scope
      this.ready = load(url)
    }
    // What is sent before the script has loaded waits for it.
    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.scope.frameElement.remove()
    }
  }
